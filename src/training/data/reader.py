"""What runs in a reading process: a fixed set of streams, and their part of every batch."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardclip.errors import UserError
from shardclip.training.data.batch import Batch
from shardclip.training.data.samples import LeftOut, Sample, SampleMaker, Tokenizer, collate
from shardclip.training.data.streams import Data, Stream

log = logging.getLogger(__name__)

SKIP_WINDOW = 10_000
"""Samples over which the rate of those left out is taken."""
NAME_BYTES = 512


@dataclass(frozen=True)
class Failure:
    """What a worker hands over instead of a batch when it cannot go on: a message for the user."""

    message: str


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


class NowReading:
    """Memory that readers share with the training process: the shard that each is reading."""

    def __init__(self, readers: int) -> None:
        self._names = torch.zeros(readers, NAME_BYTES, dtype=torch.uint8).share_memory_()

    def by(self, reader: int) -> Callable[[str], None]:
        """The function that notes what a reader turns to."""
        row = self._names[reader].numpy()
        last = ""

        def note(name: str) -> None:
            nonlocal last
            if name != last:
                last = name
                row[:] = np.frombuffer(name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"), dtype=np.uint8)

        return note

    def names(self) -> list[str]:
        """What each reader was reading last."""
        return [bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in self._names]


class Reader(IterableDataset):
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
        self.now_reading = NowReading(layout.readers)

    def __iter__(self) -> Iterator[Batch | Failure]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        if worker is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            keep_freed_memory()
        reading = self.now_reading.by(number)
        try:
            streams = [
                self.data.stream(stream, self.positions.get(stream), reading)
                for stream in self.layout.streams_of(number)
            ]
            while True:
                yield self._part(streams)
        except UserError as error:
            yield Failure(str(error))

    def _part(self, streams: list[Stream]) -> Batch:
        samples: list[Sample] = []
        skipped: Counter[str] = Counter()
        for stream in streams:
            for _ in range(self.layout.per_stream):
                samples.append(self._usable(stream, skipped))
        state = {stream.number: stream.position() for stream in streams}
        return collate(samples, self.tokenize, self.size, state, skipped)

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


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks of picture size for the next picture, up to 64 MiB.

    By default each one goes back to the kernel, and touching its pages anew costs about as much as half of
    the decoding. Does nothing under another C library.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 * 2**20)
        libc.mallopt(trim_threshold, 64 * 2**20)


def in_words(skipped: Counter[str]) -> str:
    """Reasons and how often each was met."""
    return ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common())
