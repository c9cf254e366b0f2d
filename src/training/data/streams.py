"""The streams of a run over sources read by seeking: they never end, and resume from a few integers."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardclip.training.data.order import BLOCK, Position, Runs, block_order, epoch_runs, share
from shardclip.training.data.sources import RawSample, Source

Integers = NDArray[np.int64]


Located = tuple[Source, int, object, bool]
"""(source, shard, what the source's `fetch` needs, whether it was met before)."""


class Stream(Protocol):
    """An endless sequence of raw samples."""

    number: int
    """0 .. S-1."""

    def take(self) -> tuple[RawSample, int]:
        """The next sample and its place in the stream."""

    def position(self) -> list[int]:
        """Where the stream stands after the sample last taken."""


class Data(Protocol):
    """The data of a run, cut into streams."""

    seed: int
    streams: int

    @property
    def samples(self) -> int:
        """Samples of an epoch."""

    @property
    def distinct(self) -> int:
        """Samples that there are, as far as is known."""

    def fingerprint(self) -> list[int]:
        """What must not change under a run that is resumed."""

    def found(self) -> str:
        """What the sources offer, in words."""

    def stream(self, number: int, position: list[int] | None, reading: Callable[[str], None]) -> Stream:
        """One of the streams, at a position; `reading` is told each shard that is turned to."""


@dataclass
class EpochPlan:
    """The order of one epoch: its runs and where each ends in the epoch's sequence of samples."""

    source: Integers
    run: Integers
    again: NDArray[np.bool_]
    ends: Integers
    samples: int


@dataclass
class SeekingData:
    """All sources of a run, and the order in which they are met."""

    sources: list[Source]
    factors: list[float]
    seed: int
    streams: int
    """S, the streams that the run is cut into."""
    resampled: bool = False
    _runs: list[Runs] = field(default_factory=list)
    _plans: OrderedDict[int, EpochPlan] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._runs = [Runs.cut(source.shard_samples, source.grain) for source in self.sources]

    @property
    def samples(self) -> int:
        """Samples of the first epoch (of every epoch, where the factors are whole numbers)."""
        return self.plan(0).samples

    @property
    def distinct(self) -> int:
        """Samples that there are."""
        return sum(int(source.shard_samples.sum()) for source in self.sources)

    def fingerprint(self) -> list[int]:
        """What must not change under a run that is resumed: of each source the numbers of samples, shards and
        runs, and a checksum of the samples of each shard, as the order is made of them."""
        found = []
        for source, runs in zip(self.sources, self._runs, strict=True):
            counts = source.shard_samples
            found += [int(counts.sum()), len(counts), len(runs.shard), zlib.crc32(counts.tobytes())]
        return found

    def found(self) -> str:
        """What the sources offer, for the message that nothing of it is usable."""
        return "; ".join(f"{source.name}: {source.found()}" for source in self.sources)

    def stream(
        self, number: int, position: list[int] | None, reading: Callable[[str], None]
    ) -> SeekingStream:
        """One of the run's streams, at a position."""
        return SeekingStream(self, number, Position(*position) if position else Position(), reading)

    def plan(self, epoch: int) -> EpochPlan:
        """The order of an epoch (the last few are kept: streams need not stand in the same one)."""
        if epoch not in self._plans:
            counts = [len(runs.shard) for runs in self._runs]
            source, run, again = epoch_runs(counts, self.factors, self.seed, epoch, self.resampled)
            samples = np.zeros(len(source), dtype=np.int64)
            for number, runs in enumerate(self._runs):
                samples[source == number] = runs.samples[run[source == number]]
            ends = np.cumsum(samples)
            self._plans[epoch] = EpochPlan(source, run, again, ends, int(ends[-1]) if len(ends) else 0)
            while len(self._plans) > 2:
                self._plans.popitem(last=False)
        return self._plans[epoch]

    def entries(self, plan: EpochPlan, start: int, stop: int) -> list[Located]:
        """What lies at the places [start, stop) of an epoch's sequence, in order."""
        first, last = np.searchsorted(plan.ends, [start, stop - 1], side="right")
        pieces: dict[tuple[int, int], list[tuple[int, Integers, bool]]] = {}
        for row in range(int(first), int(last) + 1):
            source, run = int(plan.source[row]), int(plan.run[row])
            runs = self._runs[source]
            begin = int(plan.ends[row]) - int(runs.samples[run])
            low, high = max(start, begin), min(stop, int(plan.ends[row]))
            numbers = np.arange(low - begin, high - begin) + runs.first[run]
            pieces.setdefault((source, int(runs.shard[run])), []).append(
                (low - start, numbers, bool(plan.again[row]))
            )
        found: list[Located | None] = [None] * (stop - start)
        for (number, shard), parts in pieces.items():
            source_ = self.sources[number]
            located = iter(source_.locate(shard, np.concatenate([numbers for _, numbers, _ in parts])))
            for place, numbers, again in parts:
                for offset in range(len(numbers)):
                    found[place + offset] = (source_, shard, next(located), again)
        return [entry for entry in found if entry is not None]


class SeekingStream:
    """One of the S streams that `data` is cut into."""

    def __init__(
        self,
        data: SeekingData,
        number: int,
        position: Position,
        reading: Callable[[str], None],
    ) -> None:
        self.number = number
        self._data = data
        self._at = position
        self._reading = reading
        self._epoch: int | None = None
        self._interval = (0, 0)
        self._block: tuple[int, int] | None = None
        self._entries: list[Located] = []

    def position(self) -> list[int]:
        """Epoch, samples before it, samples of its share taken, place in the stream."""
        return self._at.integers()

    def take(self) -> tuple[RawSample, int]:
        """The next sample and its place in the stream."""
        start, stop = self._share()
        at = self._at
        block, within = divmod(at.taken, BLOCK)
        if self._block != (at.epoch, block):
            self._load_block(block, start, stop)
        source, shard, entry, again = self._entries[within]
        self._reading(source.shard_name(shard))
        raw = source.fetch(entry)
        raw.again = again
        self._at = replace(at, taken=at.taken + 1, place=at.place + 1)
        return raw, at.place

    def _share(self) -> tuple[int, int]:
        """This stream's interval of the epoch, after going on to the next epoch if this one is at its end."""
        while True:
            at = self._at
            if self._epoch != at.epoch:
                samples = self._data.plan(at.epoch).samples
                self._interval = share(samples, at.before, self.number, self._data.streams)
                self._epoch = at.epoch
            start, stop = self._interval
            if at.taken < stop - start:
                return start, stop
            samples = self._data.plan(at.epoch).samples
            self._at = Position(at.epoch + 1, at.before + samples, 0, at.place)

    def _load_block(self, block: int, start: int, stop: int) -> None:
        low = start + block * BLOCK
        high = min(low + BLOCK, stop)
        entries = self._data.entries(self._data.plan(self._at.epoch), low, high)
        order = block_order(high - low, self._data.seed, self.number, self._at.epoch, block)
        self._entries = [entries[place] for place in order]
        self._block = (self._at.epoch, block)
