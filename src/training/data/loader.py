"""The training loader: streams shared out among ranks and workers, batches whose content neither changes."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from shardclip.errors import UserError
from shardclip.training.data.batch import Batch, concatenate
from shardclip.training.data.config import DataConfig
from shardclip.training.data.counting import count_remote, total
from shardclip.training.data.decode import training_decoder
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.order import streams_for
from shardclip.training.data.reader import SKIP_WINDOW, Layout, Reader, in_words
from shardclip.training.data.remote_streams import RemoteData, say_how_dealt
from shardclip.training.data.samples import SampleMaker, Tokenizer
from shardclip.training.data.sources import Source, are_streams, expand, factors_of, is_local, open_source
from shardclip.training.data.streams import Data, SeekingData
from shardclip.training.data.table import SyntheticSource
from shardclip.training.data.workers import read

log = logging.getLogger(__name__)

FEWEST = 1_000
"""The rate is taken of this many samples at least, so that a few bad ones at the start do not end a run."""


class TrainLoader:
    """Endless batches of one rank. `state_dict` is the position after the batch last yielded."""

    def __init__(
        self,
        data: Data,
        layout: Layout,
        reader: Reader,
        config: DataConfig,
        listed: list[list[str]],
        pin_memory: bool,
    ) -> None:
        self.samples_per_epoch: int = config.train_num_samples or data.samples
        """Samples of one epoch, over all ranks."""
        self._data = data
        self._layout = layout
        self._reader = reader
        self._config = config
        self._listed = listed
        self._pin_memory = pin_memory
        self._loader: Iterator[Any] | None = None
        self._batches = 0
        self._skipped: Counter[str] = Counter()
        self._repeated = 0
        self._recent: deque[tuple[int, int]] = deque()
        self._positions: dict[int, list[int]] = {
            number: []
            for reader_number in range(layout.readers)
            for number in layout.streams_of(reader_number)
        }

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = concatenate([self._next_part() for _ in range(self._layout.readers)], self._pin_memory)
            self._account(batch)
            batch.state = self.state_dict()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank's streams, in plain types; `merge_states` joins those of all ranks."""
        return {
            "streams": self._layout.streams,
            "seed": self._data.seed,
            "fingerprint": self._data.fingerprint(),
            "samples_per_epoch": self.samples_per_epoch,
            "counted": self._counted(),
            "batches": self._batches,
            "samples": self._batches * self._layout.batch_size * self._layout.world_size,
            "positions": {str(number): list(position) for number, position in self._positions.items()},
            "skipped": dict(self._skipped),
            "repeated": self._repeated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a merged state, before the first batch is asked for.

        Raises:
            UserError: the state is that of other data, or of a number of streams that these ranks and this
                batch size cannot share; or its samples were counted, and are not as many now.
        """
        if self._loader is not None:
            raise RuntimeError("a position can be loaded only before the first batch is read")
        if list(state["fingerprint"]) != self._data.fingerprint():
            raise UserError(
                "the data is not what the run was started with (of each source samples, shards, runs and a "
                f"checksum: {state['fingerprint']} then, {self._data.fingerprint()} now), so its position "
                "means nothing. Resume with the same data, or start a new run from the checkpoint's weights."
            )
        self._check_count(state)
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
        self._data.streams = state["streams"]
        self._batches = state["batches"]
        self._skipped = Counter(state["skipped"]) if self._layout.rank == 0 else Counter()
        self._repeated = state.get("repeated", 0) if self._layout.rank == 0 else 0
        self._reader.layout = self._layout

    def seen(self) -> str:
        """What was found, in words that are equal on ranks with the same data; copies of it may lie in
        folders of different names."""
        names = [os.path.basename(shard) for shards in self._listed for shard in shards if is_local(shard)]
        digest = hashlib.blake2b(repr(names).encode(errors="backslashreplace"), digest_size=4).hexdigest()
        return (
            f"{len(names)} local shards (hash of their names {digest}), {self.samples_per_epoch:,} samples "
            f"an epoch (of each source {self._data.fingerprint()})"
        )

    def _counted(self) -> int | None:
        """Samples that there are, if the length of an epoch hangs on them."""
        return self._data.distinct if self._config.train_num_samples is None else None

    def _check_count(self, state: dict[str, Any]) -> None:
        """Refuse another count: a remote shard that cannot be read just now would change the schedule."""
        then, now = state.get("counted"), self._counted()
        if then is not None and now is not None and then != now:
            raise UserError(
                f"{then:,} samples were counted when the run was started, and {now:,} now. Resume when all "
                "shards can be read, or go on with epochs as they were by --train-num-samples "
                f"{state['samples_per_epoch']} --override."
            )

    def close(self) -> None:
        """End the workers."""
        self._loader = None

    def _next_part(self) -> Batch:
        if self._loader is None:
            self._loader = self._start()
        part = next(self._loader)
        self._positions.update(part.state)
        return part

    def _start(self) -> Iterator[Any]:
        self._reader.positions = self._positions
        workers = self._layout.readers if self._layout.workers else 0
        return read(self._reader, workers, self._config.data_timeout, self._layout.rank)

    def _account(self, batch: Batch) -> None:
        """Count what was left out; too much of it stops the run."""
        self._batches += 1
        self._skipped.update(batch.skipped)
        self._repeated += batch.repeated
        left_out = sum(batch.skipped.values())
        self._recent.append((batch.samples + left_out, left_out))
        while sum(read for read, _ in self._recent) - self._recent[0][0] >= SKIP_WINDOW:
            self._recent.popleft()
        read, left = (sum(column) for column in zip(*self._recent, strict=True))
        if left > self._config.max_skip_rate * max(read, FEWEST):
            raise UserError(
                f"{left} of the last {read} samples had to be left out, more than --max-skip-rate "
                f"{self._config.max_skip_rate} allows: {in_words(self._skipped)}. `shardclip doctor` shows "
                "what is wrong with the data."
            )


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of the whole run from those of all ranks."""
    positions: dict[str, list[int]] = {}
    skipped: Counter[str] = Counter()
    for state in states:
        positions.update(state["positions"])
        skipped.update(state["skipped"])
    return {
        **states[0],
        "positions": dict(sorted(positions.items(), key=lambda item: int(item[0]))),
        "skipped": dict(skipped),
        "repeated": sum(state["repeated"] for state in states),
    }


def account(state: dict[str, Any]) -> str:
    """What became of the samples that the run has read so far, in words; of a merged state."""
    skipped = Counter(state["skipped"])
    left_out = f"{skipped.total():,} left out" + (f": {in_words(skipped)}" if skipped else "")
    return f"{state['samples']:,} samples used, {state['repeated']:,} of them met before; {left_out}"


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
    counted: list[int] | None = None,
    pin_memory: bool = False,
) -> TrainLoader:
    """The loader of the training data.

    Args:
        batch_size: samples of this rank's batch.
        streams: how many streams a new run is cut into; `order.streams_for` when not given.
        counted: samples of each source of remote shards, if the ranks have counted them; else this process
            counts them all.

    Raises:
        UserError: the data is not there, holds nothing usable, or cannot be cut that way.
    """
    listed = [] if config.dataset_type == "synthetic" else _listed(config)
    remote = are_streams(listed, config)
    at_most = world_size * max(1, config.workers) if remote else 64
    number = streams or config.streams or streams_for(world_size, batch_size, config.workers, at_most)
    layout = Layout(number, rank, world_size, config.workers, batch_size)
    data: Data
    if remote:
        data = _remote_data(config, listed, seed, number, counted)
    else:
        sources = _sources(config, image_input, listed, rank / world_size)
        data = SeekingData(sources, factors_of(config, len(sources)), seed, number, config.dataset_resampled)
        shards, readers = sum(len(source.shard_samples) for source in sources), layout.readers * world_size
        if listed and shards < readers:
            log.info(
                "%d shards for %d reading processes: each shard is shared out among several", shards, readers
            )
    augmentation = config.augmentation()
    decoder = training_decoder(image_input, augmentation, config.decode == "exact", config.max_image_pixels)
    reader = Reader(data, layout, SampleMaker(config, decoder), tokenize, image_input.size)
    return TrainLoader(data, layout, reader, config, listed, pin_memory)


def _listed(config: DataConfig) -> list[list[str]]:
    if not config.train_data:
        raise UserError("--train-data is missing: name tar shards, a table, or use --dataset-type synthetic.")
    return expand(config.train_data)


def _sources(
    config: DataConfig, image_input: ImageInput, listed: list[list[str]], begin: float
) -> list[Source]:
    """The sources, each read in any order; a first start begins to index each at the share `begin`."""
    if not listed:
        return [SyntheticSource(config.train_num_samples or 10_000, image_input.size)]
    wanted = config.wanted()
    return [open_source(shards, config, wanted, first=int(len(shards) * begin)) for shards in listed]


def _remote_data(
    config: DataConfig, listed: list[list[str]], seed: int, streams: int, counted: list[int] | None
) -> RemoteData:
    if counted is None and (share := count_remote(config)) is not None:
        counted = total([share])
    data = RemoteData(
        listed,
        factors_of(config, len(listed)),
        seed,
        streams,
        config.wanted(),
        config.sample_key,
        config.data_retries,
        config.dataset_resampled,
        counted=counted,
    )
    say_how_dealt(data)
    return data
