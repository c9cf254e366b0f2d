"""A reader of training data: a fixed set of streams, and their part of every batch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardclip.errors import UserError
from shardclip.training.data.batch import Batch
from shardclip.training.data.samples import BatchInTheMaking, LeftOut, Sample, SampleMaker, Tokenizer
from shardclip.training.data.streams import Data, Stream
from shardclip.training.data.workers import PartReader

log = logging.getLogger(__name__)

SKIP_WINDOW = 10_000
"""Samples over which the rate of those left out is taken."""


@dataclass
class Layout:
    """How the run's streams are shared out."""

    streams: int
    rank: int
    world_size: int
    workers: int
    batch_size: int
    """Samples of one rank's batch."""

    def __post_init__(self) -> None:
        samples = self.batch_size * self.world_size
        if self.streams % self.world_size or samples % self.streams:
            possible = [n for n in range(1, samples + 1) if samples % n == 0 and n % self.world_size == 0]
            raise UserError(
                f"the data is cut into {self.streams} streams, which must be a multiple of the "
                f"{self.world_size} ranks and divide the global batch of {samples} samples. For this "
                f"batch --streams may be {', '.join(map(str, possible))}; a run that is "
                f"resumed keeps its {self.streams}, so change the number of ranks or the batch size."
            )

    @property
    def per_stream(self) -> int:
        """Samples that each stream gives to a global batch."""
        return self.batch_size * self.world_size // self.streams

    @property
    def readers(self) -> int:
        """Sets of streams that are read apart: one a worker, as far as there are streams."""
        return min(max(1, self.workers), self.streams // self.world_size)

    def streams_of(self, reader: int) -> range:
        """The streams of one of this rank's readers: neighbours, so that the order of a global batch is that
        of the streams, whatever the ranks and workers."""
        mine = self.streams // self.world_size
        first = self.rank * mine
        return range(first + mine * reader // self.readers, first + mine * (reader + 1) // self.readers)


class Reader(PartReader):
    """An endless iterator over this process's part of each of the rank's batches."""

    def __init__(
        self, data: Data, layout: Layout, maker: SampleMaker, tokenize: Tokenizer, size: tuple[int, int]
    ) -> None:
        self.data = data
        self.layout = layout
        self.maker = maker
        self.tokenize = tokenize
        self.size = size
        self.positions: dict[int, list[int]] = {}

    def parts(self, number: int, readers: int, reading: Callable[[str], None]) -> Iterator[Batch]:
        """One part of each batch, for ever."""
        streams = [
            self.data.stream(stream, self.positions.get(stream), reading)
            for stream in self.layout.streams_of(number)
        ]
        while True:
            yield self._part(streams)

    def _part(self, streams: list[Stream]) -> Batch:
        making = BatchInTheMaking(self.tokenize, self.size)
        skipped: Counter[str] = Counter()
        for stream in streams:
            for _ in range(self.layout.per_stream):
                making.add(self._usable(stream, skipped))
        state = {stream.number: stream.position() for stream in streams}
        return making.batch(state, skipped)

    def _usable(self, stream: Stream, skipped: Counter[str]) -> Sample:
        """The stream's next sample that can be used; those before it are counted."""
        barren = 0
        first_epoch = stream.position()[0]
        while True:
            raw, place = stream.take()
            try:
                return self.maker.make(raw, self.data.seed, stream.number, place)
            except LeftOut as reason:
                skipped[str(reason)] += 1
                barren += 1
                log.debug("left out %s: %s", raw.key, reason)
            lapped = barren >= 100 and stream.position()[0] >= first_epoch + 2
            if lapped or barren >= min(self.data.distinct, SKIP_WINDOW):
                raise UserError(
                    f"none of {barren} samples in a row could be used: {in_words(skipped)}. "
                    f"{self.data.found()}."
                )


def in_words(skipped: Counter[str]) -> str:
    """Reasons and how often each was met."""
    return ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common())
