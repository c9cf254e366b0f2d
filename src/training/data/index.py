"""Where a tar shard's members lie: an index beside the shard, so that reading seeks instead of scanning."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardclip.errors import UserError
from shardclip.training.data.ranges import fingerprint, open_seekable
from shardclip.training.data.sources import expand, is_local, is_tar

log = logging.getLogger(__name__)

VERSION = 2
BESIDE = ".shardclip-index"
"""Name of the folder of indexes in a folder of shards."""

NAME_ERRORS = "backslashreplace"
"""What of a member's name is not UTF-8 is spelt out (caf\\xe9), so that keys can be logged anywhere."""

META = re.compile(r"__[^/]*__($|/)")

SampleKey = str
"""Which rule cuts a member's name into key and suffix: "first-dot" or "last-dot"."""


@dataclass(frozen=True)
class ShardIndex:
    """The members of one shard, grouped into samples; a sample's number is the place of its first member."""

    keys: NDArray[np.bytes_]
    """[N] key of each sample (utf-8)."""
    suffixes: NDArray[np.str_]
    """[K] the different suffixes of the shard."""
    sample: NDArray[np.int32]
    """[M] sample that each member belongs to."""
    suffix: NDArray[np.int32]
    """[M] its suffix, as a place in `suffixes`."""
    offset: NDArray[np.int64]
    """[M] first byte of its content in the tar file."""
    size: NDArray[np.int64]
    """[M] bytes of its content."""
    damage: str
    """What ended the reading before the tar's end, empty for a whole one."""

    def __len__(self) -> int:
        return len(self.keys)

    def members(self, wanted: tuple[str, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offset and size, each [N], of each sample's member of the first wanted suffix; -1 for none."""
        offset = np.full(len(self), -1, dtype=np.int64)
        size = np.full(len(self), -1, dtype=np.int64)
        for suffix in reversed(wanted):
            rows = np.isin(self.suffix, np.flatnonzero(self.suffixes == suffix))
            offset[self.sample[rows]] = self.offset[rows]
            size[self.sample[rows]] = self.size[rows]
        return offset, size


def split_name(name: str, rule: SampleKey) -> tuple[str, str] | None:
    """Key and lower-case suffix of a tar member's name; None for one without a suffix, hidden, or of the
    format's own (`__name__`).

    The WebDataset format cuts at the first dot of the base name; "last-dot" cuts at the last.
    """
    folder, slash, base = name.rpartition("/")
    if base.startswith(".") or META.match(name):
        return None
    stem, dot, suffix = base.partition(".") if rule == "first-dot" else base.rpartition(".")
    if not dot or not stem or not suffix:
        return None
    return folder + slash + stem, suffix.lower()


def scan(path: str, rule: SampleKey) -> ShardIndex:
    """The index of a shard, from its tar headers alone. Members of one key need not stand together."""
    keys: dict[str, int] = {}
    suffixes: dict[str, int] = {}
    rows: list[tuple[int, int, int, int]] = []
    damage = ""
    try:
        with (
            open_seekable(path) as file,
            tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors=NAME_ERRORS) as tar,
        ):
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # the list would grow with the shard
                split = split_name(member.name, rule) if member.isfile() else None
                if split is None:
                    continue
                sample = keys.setdefault(split[0], len(keys))
                suffix = suffixes.setdefault(split[1], len(suffixes))
                rows.append((sample, suffix, member.offset_data, member.size))
            damage = _end_of(file, tar.offset)  # type: ignore[attr-defined]
    except tarfile.ReadError as error:
        if str(error) != "empty file":
            damage = str(error) or "not a tar file"
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return ShardIndex(
        keys=np.array([key.encode() for key in keys], dtype=np.bytes_),
        suffixes=np.array(list(suffixes), dtype=np.str_),
        sample=table[:, 0].astype(np.int32),
        suffix=table[:, 1].astype(np.int32),
        offset=table[:, 2],
        size=table[:, 3],
        damage=damage,
    )


def _end_of(file: IO[bytes], offset: int) -> str:
    """What is wrong with the end of a tar whose last whole member ends at `offset`, where a block of zeros is
    meant; empty if nothing is. tarfile takes anything there for the end."""
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if block == bytes(tarfile.BLOCKSIZE):
        return ""
    if len(block) < tarfile.BLOCKSIZE:
        return f"cut short {'inside' if block else 'before'} the header at byte {offset}"
    return f"no valid header at byte {offset}"


def _fingerprint(path: str) -> NDArray[np.int64]:
    return np.concatenate([[VERSION], fingerprint(path)])


def _places(path: str, rule: SampleKey) -> list[Path]:
    """Where a shard's index may lie: beside a local one, and in the user's cache (for a remote one, and where
    nothing can be written beside it)."""
    absolute = os.path.abspath(path) if is_local(path) else path
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = hashlib.blake2b(os.path.dirname(absolute).encode(), digest_size=8).hexdigest()
    name = f"{os.path.basename(absolute)}.{rule}.npz"
    cached = Path(cache) / "shardclip" / "index" / folder / name
    return [Path(absolute).parent / BESIDE / name, cached] if is_local(path) else [cached]


def _load(place: Path, fingerprint: NDArray[np.int64]) -> ShardIndex | None:
    """The index in a file; None if there is none, it is damaged, or the shard has changed since."""
    try:
        with np.load(place, allow_pickle=False) as stored:
            if not np.array_equal(stored["fingerprint"], fingerprint):
                return None
            fields = {name: stored[name] for name in ShardIndex.__dataclass_fields__ if name != "damage"}
            return ShardIndex(**fields, damage=str(stored["damage"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _store(index: ShardIndex, place: Path, fingerprint: NDArray[np.int64]) -> bool:
    """Write an index whole or not at all; whether it worked."""
    fields: dict[str, Any] = {
        name: np.asarray(getattr(index, name)) for name in ShardIndex.__dataclass_fields__
    }
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            np.savez(file, fingerprint=fingerprint, **fields)
        os.replace(file.name, place)
    except OSError:
        return False
    return True


def shard_index(path: str, rule: SampleKey = "first-dot") -> ShardIndex:
    """The index of a shard that can be read in pieces: read if there is a valid one, else made and kept
    beside the shard or, where that cannot be written, in the user's cache.

    Raises:
        OSError: the shard cannot be opened.
    """
    fingerprint = _fingerprint(path)
    places = _places(path, rule)
    for place in places:
        if (index := _load(place, fingerprint)) is not None:
            return index
    index = scan(path, rule)
    for place in places:
        if _store(index, place, fingerprint):
            break
    return index


def shard_samples(paths: list[str], rule: SampleKey, first: int = 0) -> NDArray[np.int64]:
    """[shards] samples of each shard. Missing indexes are made, beginning with shard `first`, so that
    processes that begin at different shards share the work of a first start. What is damaged is said."""
    counts = np.zeros(len(paths), dtype=np.int64)
    damaged = 0
    for number in np.roll(np.arange(len(paths)), -first):
        index = shard_index(paths[number], rule)
        counts[number] = len(index)
        if index.damage:
            damaged += 1
            log.debug("%s: %s; %d samples lie before that", paths[number], index.damage, len(index))
            example = f"{paths[number]}: {index.damage}"
    if damaged:
        log.warning(
            "%d of %d shards are damaged (%s); what lies before the damage is read",
            damaged,
            len(paths),
            example,
        )
    return counts


def build_index(urls: str, rule: SampleKey = "first-dot") -> int:
    """`shardclip index`: index every local tar shard that `urls` (the form of --train-data) names.

    Prints a line per source; exit code 0, or 1 if a shard is damaged (its whole members are indexed).
    """
    from rich.progress import track

    damaged = 0
    for source, shards in enumerate(expand(urls)):
        local = [shard for shard in shards if is_local(shard) and is_tar(shard)]
        if not local:
            raise UserError(
                f"source {source + 1} of {urls!r} has no local tar shard: there is nothing to index."
            )
        samples = 0
        for path in track(local, description=f"source {source + 1}"):
            index = shard_index(path, rule)
            samples += len(index)
            if index.damage:
                damaged += 1
                print(f"damaged: {path}: {index.damage}; {len(index)} samples lie before the damage")
        print(f"source {source + 1}: {samples} samples in {len(local)} shards, {_found(local[:1], rule)}")
    return 1 if damaged else 0


def main(argv: Sequence[str]) -> int:
    """The verb `index` from its words."""
    parser = argparse.ArgumentParser("shardclip index", description="count and index local tar shards")
    parser.add_argument("data", help="shards in the form that --train-data takes")
    parser.add_argument("--sample-key", choices=("first-dot", "last-dot"), default="first-dot")
    options = parser.parse_args(list(argv))
    return build_index(options.data, options.sample_key)


def _found(paths: Iterable[str], rule: SampleKey) -> str:
    """The suffixes of the given shards, in words."""
    suffixes = sorted({str(suffix) for path in paths for suffix in shard_index(path, rule).suffixes})
    shown = ", ".join(suffixes[:20]) + (", ..." if len(suffixes) > 20 else "")
    return f"suffixes {shown}" if suffixes else "no members"
