"""How many samples remote shards hold: what lies beside them says so, else one pass over their headers."""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rich.progress import track

from shardclip.errors import UserError
from shardclip.training.data.config import DataConfig
from shardclip.training.data.remote import RemoteShard, Unreadable, found_and_wanted, open_stream
from shardclip.training.data.sources import are_streams, expand
from shardclip.training.fetching import Fetched

log = logging.getLogger(__name__)

T = TypeVar("T")

AT_ONCE = 8
"""Shards that a process counts at the same time."""
SIGN_OF_LIFE = 100
"""Samples of a shard after which its counting shows that it goes on."""


@dataclass(frozen=True)
class Counted:
    """What one rank has found out of its share of the shards."""

    samples: tuple[int, ...]
    """Of each source."""
    read: int
    """Shards that had to be read, as nothing beside them told."""
    suffixes: tuple[str, ...]
    """What the members of those shards are."""
    wanted: Mapping[str, Sequence[str]]
    """Suffixes of the members that make a sample, by role."""


def count_remote(config: DataConfig, rank: int = 0, world_size: int = 1) -> Counted | None:
    """This rank's share of the samples of --train-data; None where no shard is remote or --train-num-samples
    says it. Rank 0 draws a progress bar.

    A shard's number is taken from its folder's `sizes.json` ({"00000.tar": 10000, ...}), from img2dataset's
    `_stats.json` beside it, or from its folder's `__len__` (open_clip's file: one number for all); else the
    shard is read. One that cannot be read counts nothing, and is said.

    Raises:
        UserError: nothing came of a shard, or of what lies beside it, for as long as --data-timeout says.
    """
    if config.train_num_samples is not None or config.dataset_type == "synthetic" or not config.train_data:
        return None
    listed = expand(config.train_data)
    if not are_streams(listed, config):
        return None
    numbered = [(source, url) for source, shards in enumerate(listed) for url in shards]
    counter = _Counter(config, [url for _, url in numbered])
    mine = numbered[rank::world_size]
    samples = [0] * len(listed)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        counts = pool.map(counter.count, [url for _, url in mine])
        bar = track(counts, "counting remote shards", total=len(mine), disable=rank > 0)
        for (source, _), count in zip(mine, bar, strict=True):
            samples[source] += count
    return Counted(tuple(samples), counter.read, tuple(counter.suffixes), config.wanted())


def total(shares: Sequence[Counted]) -> list[int]:
    """The samples of each source by all ranks' shares; says so where shards had to be read.

    Raises:
        UserError: there are none.
    """
    samples = [sum(column) for column in zip(*(share.samples for share in shares), strict=True)]
    if not sum(samples):
        found = dict.fromkeys(suffix for share in shares for suffix in share.suffixes)
        raise UserError(
            f"no sample of the remote shards could be counted ({found_and_wanted(found, shares[0].wanted)})."
        )
    if read := sum(share.read for share in shares):
        log.warning(
            "%s samples were counted by reading %d remote shards; --train-num-samples, or a sizes.json "
            "beside the shards, spares the next run that",
            f"{sum(samples):,}",
            read,
        )
    return samples


class _Counter:
    """Counts shard by shard, with what their folders tell of them at hand."""

    def __init__(self, config: DataConfig, urls: list[str]) -> None:
        self._config = config
        first_of: dict[str, str] = {}
        for url in urls:
            first_of.setdefault(posixpath.dirname(url), url)
        folders = {folder: url for folder, url in first_of.items() if not url.startswith("pipe:")}
        self._sizes = {folder: self._beside(folder, "sizes.json", _object) for folder in folders}
        self._lengths = {
            folder: self._beside(folder, "__len__", _number) for folder in folders if not self._sizes[folder]
        }
        self._first = set(folders.values())
        self.read = 0
        self.suffixes: dict[str, None] = {}

    def count(self, url: str) -> int:
        """Samples of a shard.

        Raises:
            UserError: it was not heard of for as long as --data-timeout says.
        """
        return _last_of(self._counting(url), url, self._config.data_timeout)

    def _beside(self, folder: str, name: str, content: Callable[[str], T]) -> T:
        url = f"{folder}/{name}"
        return _last_of(map(content, [url]), url, self._config.data_timeout)

    def _counting(self, url: str) -> Iterator[int]:
        """How many samples a shard holds as far as is known by now; the last number is all of them."""
        folder, name = posixpath.split(url)
        told = None if url.startswith("pipe:") else self._told(url, folder, name)
        if told is None:
            yield from self._by_reading(url)
        else:
            yield told

    def _told(self, url: str, folder: str, name: str) -> int | None:
        if (samples := self._sizes[folder].get(name)) is not None:
            return int(samples)
        stats = _object(f"{url.removesuffix('.tar')}_stats.json") if url.endswith(".tar") else {}
        if (samples := stats.get("successes")) is not None:
            return int(samples)
        length = self._lengths.get(folder)
        if length is None:
            return None
        return length if url in self._first else 0

    def _by_reading(self, url: str) -> Iterator[int]:
        self.read += 1
        shard = RemoteShard(url, self._config.wanted(), self._config.sample_key, self._config.data_retries)
        shard.suffixes = self.suffixes
        samples = 0
        try:
            for samples, _ in enumerate(shard.keys(), start=1):
                if samples % SIGN_OF_LIFE == 0:
                    yield samples
        except Unreadable as error:
            log.warning("%s is left out of the count: %s", url, error)
            samples = 0
        yield samples


def _last_of(told: Iterator[T], url: str, seconds: float) -> T:
    """The last that is told of an address.

    Raises:
        UserError: nothing more was told for so many seconds.
    """
    telling = Fetched(told)
    last: T | None = None
    try:
        while True:
            last = telling.take(seconds)
    except StopIteration:
        return cast(T, last)
    except TimeoutError as error:
        raise UserError(
            f"nothing came of {url} for {seconds:g} seconds (--data-timeout) while samples were counted. "
            "--train-num-samples spares the counting."
        ) from error
    finally:
        telling.close()


def _object(url: str) -> dict[str, Any]:
    """A remote JSON object; empty if it is not there."""
    try:
        found = json.loads(_content(url))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(url: str) -> int | None:
    """The number in a remote file; None if it is not there."""
    try:
        return int(_content(url))
    except (OSError, ValueError):
        return None


def _content(url: str) -> bytes:
    stream = open_stream(url)
    try:
        return stream.read()
    finally:
        stream.close()
