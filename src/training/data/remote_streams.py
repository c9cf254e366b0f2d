"""One stream of a run over shards that can only be read from their front.

Whole shards are dealt to the streams: those of an epoch are permuted by (seed, epoch), and the q-th of the
endless sequence goes to stream q mod S. With fewer shards than streams each shard is read by several
streams, which share its samples out by turns. Blocks are shuffled as in `streams.py`, but held in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardclip.errors import UserError
from shardclip.training.data.index import SampleKey
from shardclip.training.data.order import BLOCK, block_order, epoch_runs
from shardclip.training.data.remote import RemoteShard, found_and_wanted, short_name
from shardclip.training.data.sources import RawSample

log = logging.getLogger(__name__)

BLOCK_BYTES = 64 * 2**20
"""A block ends when its samples take this many bytes, however few they are."""

GIVE_UP = 3
"""Shards in a row of which nothing could be read."""

BARREN = 10
"""Shards in a row, no two of them the same, in which a stream found no sample. (Some may well be empty.)"""


@dataclass
class RemoteData:
    """All shards of a run, and the order in which they are met."""

    shards: list[list[str]]
    """[sources][shards] addresses."""
    factors: list[float]
    seed: int
    streams: int
    wanted: dict[str, tuple[str, ...]]
    rule: SampleKey
    retries: int
    resampled: bool = False
    counted: list[int] | None = None
    """Samples of each source; None where --train-num-samples says what an epoch is."""
    _suffixes: dict[str, None] = field(default_factory=dict)

    @property
    def parts(self) -> int:
        """Streams that read each shard."""
        return -(-self.streams // sum(len(shards) for shards in self.shards))

    @property
    def samples(self) -> int:
        """Samples of one epoch, which were counted."""
        assert self.counted is not None
        if self.resampled:
            return sum(self.counted)
        return round(sum(count * factor for count, factor in zip(self.counted, self.factors, strict=True)))

    @property
    def distinct(self) -> int:
        """Samples that there are, as far as is known."""
        return sum(self.counted or [2**62])

    def fingerprint(self) -> list[int]:
        """What must not change under a run that is resumed: the number of shards of each source."""
        return [len(shards) for shards in self.shards]

    def found(self) -> str:
        """Suffixes found so far and wanted."""
        return found_and_wanted(self._suffixes, self.wanted)

    def refuse_barren(self, barren: set[tuple[int, int]]) -> None:
        """Stop the run if these units, in none of which a sample was found, are as many as are put up with.

        Raises:
            UserError: they are.
        """
        met = [
            len(shards) * self.parts
            for shards, factor in zip(self.shards, self.factors, strict=True)
            if factor
        ]
        if len(barren) >= min(sum(met), BARREN):
            raise UserError(f"no sample was found in {len(barren)} remote shards ({self.found()}).")

    def units(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The epoch's (source, shard * parts + part, met before) in order."""
        counts = [len(shards) * self.parts for shards in self.shards]
        return epoch_runs(counts, self.factors, self.seed, epoch, self.resampled)

    def shard(self, source: int, unit: int) -> RemoteShard:
        """The shard that a unit is (a part of)."""
        shard = RemoteShard(self.shards[source][unit // self.parts], self.wanted, self.rule, self.retries)
        shard.suffixes = self._suffixes
        return shard

    def stream(self, number: int, position: list[int] | None, reading: Callable[[str], None]) -> RemoteStream:
        """One of the run's streams, at a position."""
        return RemoteStream(self, number, RemotePosition(*position) if position else None, reading)


@dataclass
class RemotePosition:
    """Where a stream stands: the start of its block, and how far it is in it."""

    epoch: int = 0
    before: int = 0
    """Units of all epochs before this one."""
    unit: int = 0
    """Place of the block's first unit in the epoch's order."""
    offset: int = 0
    """Samples of that unit's shard that lie before the block."""
    blocks: int = 0
    """Blocks that lie behind."""
    within: int = 0
    """Samples of the block that were taken."""
    place: int = 0
    """Samples that the stream has read since the run's first start."""

    def integers(self) -> list[int]:
        """The position as a checkpoint holds it."""
        return [self.epoch, self.before, self.unit, self.offset, self.blocks, self.within, self.place]


class RemoteStream:
    """One of the S streams that `data` is cut into."""

    def __init__(
        self,
        data: RemoteData,
        number: int,
        position: RemotePosition | None,
        reading: Callable[[str], None],
    ) -> None:
        self.number = number
        self._data = data
        self._at = position or RemotePosition()
        self._reading = reading
        self._next = self._samples(self._at)
        self._block: list[RawSample] = []
        self._after = self._at
        if self._at.within:
            self._fill()

    def position(self) -> list[int]:
        """See `RemotePosition`."""
        return self._at.integers()

    def take(self) -> tuple[RawSample, int]:
        """The next sample and its place in the stream."""
        if self._at.within >= len(self._block):
            if self._block:
                place = self._at.place
                self._at = self._after
                self._at.place = place
            self._fill()
        raw = self._block[self._at.within]
        place = self._at.place
        self._at = RemotePosition(*self._at.integers())
        self._at.within += 1
        self._at.place += 1
        return raw, place

    def _fill(self) -> None:
        """Read the block that begins at the position, and note where the next one begins."""
        block: list[RawSample] = []
        size = 0
        while len(block) < BLOCK and size < BLOCK_BYTES:
            raw, self._after = next(self._next)
            if raw is None:
                if block:
                    break
                continue
            block.append(raw)
            size += sum(len(part) for part in raw.parts.values())
        order = block_order(len(block), self._data.seed, self.number, self._at.epoch, self._at.blocks)
        self._after.blocks = self._at.blocks + 1
        self._block = [block[place] for place in order]

    def _samples(self, start: RemotePosition) -> Iterator[tuple[RawSample | None, RemotePosition]]:
        """This stream's samples from a block on, each with the position after it; None after an epoch."""
        epoch, before, first, offset = start.epoch, start.before, start.unit, start.offset
        unreadable = 0
        barren: set[tuple[int, int]] = set()
        while True:
            source, unit, again = self._data.units(epoch)
            for row in range(first, len(unit)):
                if (before + row) % self._data.streams != self.number:
                    continue
                shard = self._data.shard(int(source[row]), int(unit[row]))
                self._reading(shard.url)
                part = int(unit[row]) % self._data.parts
                if not offset:
                    barren.add((int(source[row]), int(unit[row])))
                for number, raw in enumerate(shard.samples(offset), start=offset):
                    unreadable = unreadable + 1 if raw.problem is not None and number == offset else 0
                    if unreadable == GIVE_UP:
                        raise UserError(
                            f"{GIVE_UP} remote shards in a row could not be read, the last of them "
                            f"{shard.url}: {shard.failure}"
                        )
                    raw.again = bool(again[row])
                    if number % self._data.parts == part or raw.problem is not None:
                        barren.clear()
                        yield raw, RemotePosition(epoch, before, row, number + 1)
                self._data.refuse_barren(barren)
                offset = 0
            epoch, before, first = epoch + 1, before + len(unit), 0
            yield None, RemotePosition(epoch, before)


def say_how_dealt(data: RemoteData) -> None:
    """The line that tells how shards reach the streams."""
    shards = sum(len(source) for source in data.shards)
    if data.parts > 1:
        log.warning(
            "%d remote shards for %d streams: each shard is read %d times an epoch, by streams that share "
            "out its samples. More shards or fewer --streams read less.",
            shards,
            data.streams,
            data.parts,
        )
    else:
        log.info(
            "%d remote shards are dealt whole to %d streams (%s ..)",
            shards,
            data.streams,
            short_name(data.shards[0][0]),
        )
