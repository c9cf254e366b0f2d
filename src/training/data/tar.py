"""Tar shards read by seeking with the help of their indexes."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardclip.training.data.index import SampleKey, shard_index, shard_samples
from shardclip.training.data.order import run_length
from shardclip.training.data.ranges import Pieces
from shardclip.training.data.sources import RawSample

CACHED_BYTES = 32 * 2**20
"""Bytes of shard indexes that a reading process keeps."""


class Places(NamedTuple):
    """What is kept of a shard's index: keys [N] and, by role, offset and size [N] (-1: no such member)."""

    keys: NDArray[np.bytes_]
    roles: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self.keys.nbytes + sum(column.nbytes for both in self.roles.values() for column in both)

    def of(self, samples: NDArray[np.int64]) -> Places:
        """What is kept of some samples."""
        roles = {role: (offset[samples], size[samples]) for role, (offset, size) in self.roles.items()}
        return Places(self.keys[samples], roles)


class Entry(NamedTuple):
    """One sample of a shard. Cheap: most of those of a stream's first block may never be read."""

    shard: int
    row: int
    """Its place in `places`; its number in the shard if there are none."""
    places: Places | None
    """Those of the samples that were located with it; None if the shard is not there now."""


class TarSource:
    """The samples of tar files, local or in a store that serves ranges. Only wanted members are read."""

    def __init__(
        self, shards: list[str], wanted: dict[str, tuple[str, ...]], rule: SampleKey, first: int = 0
    ) -> None:
        self.name = shards[0] if len(shards) == 1 else f"{shards[0]} .. {os.path.basename(shards[-1])}"
        self.shards = shards
        self.wanted = wanted
        self.rule = rule
        self.shard_samples = shard_samples(shards, rule, first)
        self.grain = run_length(int(self.shard_samples.sum()))
        self._places: OrderedDict[int, Places] = OrderedDict()
        self._places_bytes = 0
        self._pieces = Pieces()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": OrderedDict(), "_places_bytes": 0}

    def shard_name(self, shard: int) -> str:
        """The path of a shard."""
        return self.shards[shard]

    def locate(self, shard: int, samples: NDArray[np.int64]) -> list[object]:
        """The entries of these samples; of a shard that has vanished, entries without a place."""
        try:
            places = self._places_of(shard)
        except OSError:
            return [Entry(shard, int(number), None) for number in samples]
        if len(places.keys) <= samples.max(initial=-1):
            return [Entry(shard, int(number), None) for number in samples]
        located = places.of(samples)
        return [Entry(shard, row, located) for row in range(len(samples))]

    def fetch(self, entry: object) -> RawSample:
        """Read a sample's wanted members."""
        assert isinstance(entry, Entry)
        shard, row, places = entry
        key = f"sample {row}" if places is None else places.keys[row].decode()
        raw = RawSample(f"{os.path.basename(self.shards[shard])}:{key}")
        try:
            if places is None:
                raise FileNotFoundError
            for role, (offsets, sizes) in places.roles.items():
                offset, size = int(offsets[row]), int(sizes[row])
                if offset < 0:
                    continue
                content = self._pieces.read(self.shards[shard], offset, size)
                if len(content) < size:
                    raw.problem = "shard cut short"
                    break
                raw.parts[role] = content
        except OSError:
            raw.problem = "shard cannot be read"
        return raw

    def offers(self, whole: bool) -> bool:
        """Whether any sample has all wanted roles (`whole`) or any of them; the first that does tells."""
        for shard in np.flatnonzero(self.shard_samples):
            has = np.stack([offset >= 0 for offset, _ in self._places_of(int(shard)).roles.values()])
            if (has.all(axis=0) if whole else has.any(axis=0)).any():
                return True
        return False

    def found(self) -> str:
        """The suffixes of the first shards, and those that were wanted."""
        suffixes: dict[str, str] = {}
        for path in self.shards[:3]:
            index = shard_index(path, self.rule)
            for suffix, row in zip(*np.unique(index.suffix, return_index=True), strict=True):
                suffixes.setdefault(str(index.suffixes[suffix]), index.keys[index.sample[row]].decode())
        wanted = "; ".join(f"{role}: {', '.join(names)}" for role, names in self.wanted.items())
        if not suffixes:
            return "its shards have no members"
        shown = ", ".join(list(suffixes)[:10]) + (", ..." if len(suffixes) > 10 else "")
        message = f"suffixes found: {shown}; suffixes wanted: {wanted}"
        return message + self._dotted_names(suffixes)

    def _dotted_names(self, suffixes: dict[str, str]) -> str:
        """A hint, if a name's last suffix is wanted but the first dot cuts it elsewhere."""
        wanted = {name for names in self.wanted.values() for name in names}
        for suffix, key in suffixes.items():
            if suffix not in wanted and suffix.rpartition(".")[2] in wanted and self.rule == "first-dot":
                return (
                    f". The member {key}.{suffix} is cut at the first dot of its name, as the format rules, "
                    f"into the key {key!r} and the suffix {suffix!r}; --sample-key last-dot cuts at the last"
                )
        return ""

    def _places_of(self, shard: int) -> Places:
        if shard in self._places:
            self._places.move_to_end(shard)
            return self._places[shard]
        index = shard_index(self.shards[shard], self.rule)
        places = Places(index.keys, {role: index.members(names) for role, names in self.wanted.items()})
        self._places[shard] = places
        self._places_bytes += places.bytes
        while self._places_bytes > CACHED_BYTES and len(self._places) > 1:
            self._places_bytes -= self._places.popitem(last=False)[1].bytes
        return places
