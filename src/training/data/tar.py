"""Local tar shards, read by seeking with the help of their indexes."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardclip.training.data.index import SampleKey, ShardIndex, shard_index, shard_samples
from shardclip.training.data.order import run_length
from shardclip.training.data.sources import RawSample

OPEN_FILES = 64
CACHED_BYTES = 32 * 2**20
"""Bytes of shard indexes that a reading process keeps."""


class Member(NamedTuple):
    """One sample of a shard: its key and, by role, where its members lie."""

    shard: int
    key: str
    places: tuple[tuple[str, int, int], ...]
    """(role, offset, bytes) of each wanted member that the sample has."""


class TarSource:
    """The samples of local tar files. Only wanted members are read."""

    def __init__(
        self, shards: list[str], wanted: dict[str, tuple[str, ...]], rule: SampleKey, first: int = 0
    ) -> None:
        self.name = shards[0] if len(shards) == 1 else f"{shards[0]} .. {os.path.basename(shards[-1])}"
        self.shards = shards
        self.wanted = wanted
        self.rule = rule
        self.shard_samples = shard_samples(shards, rule, first)
        self.grain = run_length(int(self.shard_samples.sum()))
        self._indexes: OrderedDict[int, ShardIndex] = OrderedDict()
        self._indexed_bytes = 0
        self._files: OrderedDict[int, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict(), "_indexes": OrderedDict(), "_indexed_bytes": 0}

    def shard_name(self, shard: int) -> str:
        """The path of a shard."""
        return self.shards[shard]

    def locate(self, shard: int, samples: NDArray[np.int64]) -> list[object]:
        """The `Member`s of these samples; of a shard that has vanished, members without a place."""
        try:
            index = self._index(shard)
        except OSError:
            return [Member(shard, f"sample {number}", ()) for number in samples]
        if len(index) <= samples.max(initial=-1):
            return [Member(shard, f"sample {number}", ()) for number in samples]
        members = {role: index.members(suffixes) for role, suffixes in self.wanted.items()}
        return [
            Member(
                shard,
                index.keys[number].decode(),
                tuple(
                    (role, int(offset[number]), int(size[number]))
                    for role, (offset, size) in members.items()
                    if offset[number] >= 0
                ),
            )
            for number in samples
        ]

    def fetch(self, entry: object) -> RawSample:
        """Read a sample's wanted members."""
        assert isinstance(entry, Member)
        raw = RawSample(f"{os.path.basename(self.shards[entry.shard])}:{entry.key}")
        try:
            file = self._file(entry.shard)
            for role, offset, size in entry.places:
                content = os.pread(file, size, offset)
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
            index = self._index(int(shard))
            has = np.stack([index.members(suffixes)[0] >= 0 for suffixes in self.wanted.values()])
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

    def _index(self, shard: int) -> ShardIndex:
        if shard in self._indexes:
            self._indexes.move_to_end(shard)
            return self._indexes[shard]
        index = shard_index(self.shards[shard], self.rule)
        self._indexes[shard] = index
        self._indexed_bytes += _bytes(index)
        while self._indexed_bytes > CACHED_BYTES and len(self._indexes) > 1:
            self._indexed_bytes -= _bytes(self._indexes.popitem(last=False)[1])
        return index

    def _file(self, shard: int) -> int:
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        file = os.open(self.shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        self._files[shard] = file
        if len(self._files) > OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return file


def _bytes(index: ShardIndex) -> int:
    return (
        index.keys.nbytes
        + index.sample.nbytes
        + index.suffix.nbytes
        + index.offset.nbytes
        + index.size.nbytes
    )
