"""The training loader: streams shared out among ranks and workers, batches whose content neither changes."""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardclip.errors import UserError
from shardclip.training.data.batch import Batch, concatenate
from shardclip.training.data.config import DataConfig
from shardclip.training.data.decode import training_decoder
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.order import streams_for
from shardclip.training.data.samples import LeftOut, Sample, SampleMaker, Tokenizer, collate
from shardclip.training.data.sources import Source, expand, factors_of, kind_of, open_source
from shardclip.training.data.streams import SeekingData, SeekingStream, Stream
from shardclip.training.data.table import SyntheticSource

log = logging.getLogger(__name__)

SKIP_WINDOW = 10_000
"""Samples over which the rate of those left out is taken."""
FEWEST = 1_000
"""The rate is taken of this many samples at least, so that a few bad ones at the start do not end a run."""


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
                f"the data is cut into {self.streams} streams, which must be a multiple of the {self.world_size} "
                f"ranks and divide the global batch of {samples} samples. For this batch --streams may be "
                f"{', '.join(map(str, possible))}; a run that is resumed keeps its {self.streams}, so change the "
                "number of ranks or the batch size."
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


class Reader(IterableDataset):
    """What runs in a worker: an endless iterator over this worker's part of each of the rank's batches."""

    def __init__(
        self,
        data: SeekingData,
        layout: Layout,
        maker: SampleMaker,
        tokenize: Tokenizer,
        size: tuple[int, int],
    ) -> None:
        self.data = data
        self.layout = layout
        self.maker = maker
        self.tokenize = tokenize
        self.size = size
        self.positions: dict[int, list[int]] = {}

    def __iter__(self) -> Iterator[Batch | Failure]:
        worker = get_worker_info()
        if worker is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        streams = [
            SeekingStream(self.data, number, self.layout.streams, self.positions.get(number))
            for number in self.layout.streams_of(worker.id if worker else 0)
        ]
        try:
            while True:
                yield self._part(streams)
        except UserError as error:
            yield Failure(str(error))

    def _part(self, streams: list[SeekingStream]) -> Batch:
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
        while True:
            raw, place = stream.take()
            try:
                return self.maker.make(raw, self.data.seed, stream.number, place)
            except LeftOut as reason:
                skipped[str(reason)] += 1
                barren += 1
                log.debug("left out %s: %s", raw.key, reason)
            if barren >= min(self.data.distinct, SKIP_WINDOW):
                raise UserError(
                    f"none of {barren} samples in a row could be used: {_reasons(skipped)}. "
                    f"{' / '.join(f'{source.name}: {source.found()}' for source in self.data.sources)}."
                )


def _reasons(skipped: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common())


class TrainLoader:
    """Endless batches of one rank. `state_dict` is the position after the batch last yielded."""

    def __init__(
        self,
        data: SeekingData,
        layout: Layout,
        reader: Reader,
        config: DataConfig,
        pin_memory: bool,
    ) -> None:
        self.samples_per_epoch: int = config.train_num_samples or data.samples
        """Samples of one epoch, over all ranks."""
        self._data = data
        self._layout = layout
        self._reader = reader
        self._config = config
        self._pin_memory = pin_memory
        self._loader: Iterator[Any] | None = None
        self._batches = 0
        self._skipped: Counter[str] = Counter()
        self._recent: deque[tuple[int, int]] = deque()
        self._positions = {
            number: SeekingStream(data, number, layout.streams).position()
            for reader_number in range(layout.readers)
            for number in layout.streams_of(reader_number)
        }

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = concatenate([self._next_part() for _ in range(self._layout.readers)])
            self._account(batch)
            batch.state = self.state_dict()
            yield batch.pin_memory() if self._pin_memory else batch

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank's streams, in plain types; `merge_states` joins those of all ranks."""
        return {
            "streams": self._layout.streams,
            "seed": self._data.seed,
            "fingerprint": self._data.fingerprint(),
            "batches": self._batches,
            "positions": {str(number): list(position) for number, position in self._positions.items()},
            "skipped": dict(self._skipped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a merged state, before the first batch is asked for.

        Raises:
            UserError: the state is that of other data, or of a number of streams that these ranks and this
                batch size cannot share.
        """
        if self._loader is not None:
            raise RuntimeError("a position can be loaded only before the first batch is read")
        if list(state["fingerprint"]) != self._data.fingerprint():
            raise UserError(
                "the data is not what the run was started with (samples, shards, runs of each source: "
                f"{state['fingerprint']} then, {self._data.fingerprint()} now), so its position means nothing. "
                "Resume with the same data, or start a new run from the checkpoint's weights."
            )
        self._layout = Layout(
            state["streams"],
            self._layout.rank,
            self._layout.world_size,
            self._layout.workers,
            self._layout.batch_size,
        )
        known = {int(number): list(position) for number, position in state["positions"].items()}
        mine = [n for reader in range(self._layout.readers) for n in self._layout.streams_of(reader)]
        if missing := [number for number in mine if number not in known]:
            raise UserError(
                f"the saved position lacks the streams {missing}: it was not merged over all ranks."
            )
        self._positions = {number: known[number] for number in mine}
        self._data.seed = state["seed"]
        self._batches = state["batches"]
        self._skipped = Counter(state["skipped"]) if self._layout.rank == 0 else Counter()
        self._reader.layout = self._layout

    def close(self) -> None:
        """End the workers."""
        self._loader = None

    def _next_part(self) -> Batch:
        if self._loader is None:
            self._loader = self._start()
        part = next(self._loader)
        if isinstance(part, Failure):
            raise UserError(part.message)
        self._positions.update(part.state)
        return part

    def _start(self) -> Iterator[Any]:
        self._reader.positions = self._positions
        workers = self._layout.readers if self._layout.workers else 0
        return iter(
            DataLoader(
                self._reader,
                batch_size=None,
                num_workers=workers,
                timeout=self._config.data_timeout if workers else 0,
                prefetch_factor=2 if workers else None,
            )
        )

    def _account(self, batch: Batch) -> None:
        """Count what was left out; too much of it stops the run."""
        self._batches += 1
        self._skipped.update(batch.skipped)
        left_out = sum(batch.skipped.values())
        self._recent.append((batch.samples + left_out, left_out))
        while sum(read for read, _ in self._recent) - self._recent[0][0] >= SKIP_WINDOW:
            self._recent.popleft()
        read, left = (sum(column) for column in zip(*self._recent, strict=True))
        if left > self._config.max_skip_rate * max(read, FEWEST):
            raise UserError(
                f"{left} of the last {read} samples had to be left out, more than --max-skip-rate "
                f"{self._config.max_skip_rate} allows: {_reasons(self._skipped)}. `shardclip doctor` shows what "
                "is wrong with the data."
            )


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of the whole run from those of all ranks."""
    positions: dict[str, list[int]] = {}
    skipped: Counter[str] = Counter()
    for state in states:
        positions.update(state["positions"])
        skipped.update(state["skipped"])
    return {**states[0], "positions": dict(sorted(positions.items(), key=lambda item: int(item[0]))), "skipped": dict(skipped)}


def train_loader(
    config: DataConfig,
    image_input: ImageInput,
    tokenize: Tokenizer,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
    streams: int | None = None,
    pin_memory: bool = False,
) -> TrainLoader:
    """The loader of the training data.

    Args:
        batch_size: samples of this rank's batch.
        streams: how many streams a new run is cut into; `order.streams_for` when not given.

    Raises:
        UserError: the data is not there, holds nothing usable, or cannot be cut that way.
    """
    data = training_data(config, image_input, rank=rank, world_size=world_size, seed=seed)
    number = streams or config.streams or streams_for(world_size, batch_size, config.workers)
    layout = Layout(number, rank, world_size, config.workers, batch_size)
    augmentation = config.augmentation()
    decoder = training_decoder(image_input, augmentation, config.decode == "exact", config.max_image_pixels)
    reader = Reader(data, layout, SampleMaker(config, decoder), tokenize, image_input.size)
    return TrainLoader(data, layout, reader, config, pin_memory)


def training_data(
    config: DataConfig, image_input: ImageInput, *, rank: int, world_size: int, seed: int
) -> SeekingData:
    """The sources of --train-data, and their order."""
    if config.dataset_type == "synthetic":
        sources: list[Source] = [SyntheticSource(config.train_num_samples or 10_000, image_input.size)]
        return SeekingData(sources, [1.0], seed)
    if not config.train_data:
        raise UserError("--train-data is missing: name tar shards, a table, or use --dataset-type synthetic.")
    listed = expand(config.train_data)
    factors = factors_of(config, len(listed))
    if any(kind_of(shards, config) == "stream" for shards in listed):
        raise UserError("remote shards: not yet")
    sources = [
        open_source(shards, config, config.wanted(), first=len(shards) * rank // world_size)
        for shards in listed
    ]
    return SeekingData(sources, factors, seed, config.dataset_resampled)
