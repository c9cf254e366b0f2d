"""Reading data once, for evaluation: image-text pairs and labelled images, shared out among the ranks."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardclip.errors import UserError
from shardclip.training.data.batch import Batch
from shardclip.training.data.config import DataConfig
from shardclip.training.data.decode import Decoder, Pixels, Undecodable, evaluation_decoder
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.index import shard_index
from shardclip.training.data.pictures import Pictures
from shardclip.training.data.samples import BatchInTheMaking, LeftOut, SampleMaker, Tokenizer
from shardclip.training.data.sources import RawSample, Source, expand, kind_of, open_source
from shardclip.training.data.table import SyntheticSource
from shardclip.training.data.workers import PartReader, read

log = logging.getLogger(__name__)

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")

Labelled = tuple[Tensor, Tensor]
"""(images [B, 3, H, W] uint8, labels [B] int64)."""


class FolderSource:
    """A folder of one folder a class, as torchvision's ImageFolder: classes numbered in order of name."""

    grain = 1

    def __init__(self, folder: str) -> None:
        self.name = folder
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self._files = [
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted(Path(folder, name).rglob("*"))
            if path.suffix.lower() in IMAGES
        ]
        self.shard_samples = np.array([len(self._files)], dtype=np.int64)

    def shard_name(self, shard: int) -> str:
        """The folder."""
        return self.name

    def locate(self, shard: int, samples: NDArray[np.int64]) -> list[object]:
        """(path, label) pairs."""
        return [self._files[sample] for sample in samples]

    def fetch(self, entry: object) -> RawSample:
        """Read a picture's file."""
        assert isinstance(entry, tuple)
        path, label = entry
        raw = RawSample(path, {"cls": str(label).encode()})
        try:
            raw.parts["image"] = Path(path).read_bytes()
        except OSError:
            raw.problem = "image file cannot be read"
        return raw

    def found(self) -> str:
        """What the folder holds."""
        return f"{len(self.classes)} folders of classes, {len(self._files)} pictures"


@dataclass
class Part:
    """What one worker hands over: a batch's content, and what was left out on the way."""

    content: Any
    skipped: dict[str, int]


@dataclass
class FiniteReader(PartReader):
    """Every R-th batch of the rank's interval of samples, for R readers."""

    source: Source
    start: int
    stop: int
    batch_size: int
    assemble: Callable[[list[RawSample], Counter[str]], Any]

    def parts(self, number: int, readers: int, reading: Callable[[str], None]) -> Iterator[Part]:
        """The batches of reader `number`."""
        for low in range(self.start + number * self.batch_size, self.stop, readers * self.batch_size):
            reading(self.source.shard_name(self._shard_at(low)[0]))
            skipped: Counter[str] = Counter()
            raw = self.raw(low, min(low + self.batch_size, self.stop))
            yield Part(self.assemble(raw, skipped), dict(skipped))

    def raw(self, low: int, high: int) -> list[RawSample]:
        """The samples [low, high), counted through all shards in order."""
        raw: list[RawSample] = []
        while low < high:
            shard, begin, end = self._shard_at(low)
            stop = min(high, end)
            entries = self.source.locate(shard, np.arange(low - begin, stop - begin))
            raw.extend(self.source.fetch(entry) for entry in entries)
            low = stop
        return raw

    def _shard_at(self, sample: int) -> tuple[int, int, int]:
        """(shard, its first sample, the one after its last), counted through all shards in order."""
        ends = np.cumsum(self.source.shard_samples)
        shard = int(np.searchsorted(ends, sample, side="right"))
        return shard, int(ends[shard] - self.source.shard_samples[shard]), int(ends[shard])


@dataclass
class FinitePass:
    """One rank's share of a pass over a source: iterate once, or again for another pass."""

    reader: FiniteReader
    workers: int
    timeout: float
    """Seconds to wait for the next batch."""
    rank: int
    samples: int
    """Samples of all ranks."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Samples of this rank that the last pass left out, by reason."""

    def __len__(self) -> int:
        """Batches of this rank (ranks may differ by one)."""
        return -(-(self.reader.stop - self.reader.start) // self.reader.batch_size)

    def read_again(self, key: str, turn: int, row: int) -> RawSample | None:
        """The sample that was row `row` of this rank's batch number `turn`, read once more, not decoded.

        Samples that were left out of the batch can only have moved it up, so it is looked for from there on.
        None if it is not there any more.
        """
        low = self.reader.start + turn * self.reader.batch_size
        for place in range(low + row, min(low + self.reader.batch_size, self.reader.stop)):
            (raw,) = self.reader.raw(place, place + 1)
            if raw.key == key:
                return raw
        return None

    def __iter__(self) -> Iterator[Any]:
        self.skipped.clear()
        workers = min(self.workers, len(self))
        for part in read(self.reader, workers, self.timeout, self.rank):
            self.skipped.update(part.skipped)
            yield part.content
        if self.skipped:
            log.warning("%s: left out %s", self.reader.source.name, dict(self.skipped))


@dataclass
class PairAssembler:
    """Raw samples -> a `Batch` with all captions of each."""

    maker: SampleMaker
    tokenize: Tokenizer
    size: tuple[int, int]

    def __call__(self, raw: list[RawSample], skipped: Counter[str]) -> Batch:
        """The batch; a sample that cannot be used is counted and not in it."""
        making = BatchInTheMaking(self.tokenize, self.size)
        for one in raw:
            try:
                making.add(self.maker.make(one))
            except LeftOut as reason:
                skipped[str(reason)] += 1
        return making.batch({}, skipped)


@dataclass
class LabelAssembler:
    """Raw samples -> (images [B, 3, H, W] uint8, labels [B] int64)."""

    decoder: Decoder
    size: tuple[int, int]

    def __call__(self, raw: list[RawSample], skipped: Counter[str]) -> Labelled:
        """The batch; a sample that cannot be used is counted and not in it."""
        pictures, labels = Pictures(self.size), []
        for one in raw:
            try:
                pixels, label = self._read(one)
            except (Undecodable, LeftOut) as reason:
                skipped[str(reason)] += 1
                continue
            pictures.add(pixels)
            labels.append(label)
        return pictures.stacked(), torch.tensor(labels, dtype=torch.int64)

    def _read(self, raw: RawSample) -> tuple[Pixels, int]:
        if raw.problem is not None:
            raise LeftOut(raw.problem)
        label, content = raw.parts.get("cls"), raw.parts.get("image")
        if content is None or not isinstance(label, bytes):
            raise LeftOut("no image" if content is None else "no label")
        try:
            number = int(label)
        except ValueError as error:
            raise LeftOut("label is not a number") from error
        return self.decoder(content, 0), number


def pairs(
    config: DataConfig,
    image_input: ImageInput,
    tokenize: Tokenizer,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    workers: int | None = None,
) -> FinitePass:
    """The pairs of --val-data, each once over all ranks, with all captions of each sample, as `Batch`es.

    Ranks hold intervals of the data that differ by one sample at most; the last batch may be smaller, and a
    batch may lack samples that could not be used.

    Raises:
        UserError: the data is not there or holds nothing usable.
    """
    source = _evaluation_source(config, image_input, label=False)
    maker = SampleMaker(config, evaluation_decoder(image_input, config.max_image_pixels), all_captions=True)
    assembler = PairAssembler(maker, tokenize, image_input.size)
    return _share(source, config, assembler, batch_size, rank, world_size, workers)


def labelled_images(
    config: DataConfig,
    image_input: ImageInput,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    workers: int | None = None,
) -> FinitePass:
    """The labelled images of --val-data, each once over all ranks, as (images uint8, labels int64).

    Tar shards whose samples have a .cls member (CLIP_benchmark's layout), a folder of one folder a class, or
    a table with a column --csv-label-key.

    Raises:
        UserError: the data is not there or holds nothing usable.
    """
    source = _evaluation_source(config, image_input, label=True)
    assembler = LabelAssembler(evaluation_decoder(image_input, config.max_image_pixels), image_input.size)
    return _share(source, config, assembler, batch_size, rank, world_size, workers)


def roles_in(data: str, config: DataConfig) -> set[str]:
    """What there is to evaluate on in some data, by its first shard: `cls`, `text`, `json`, or several.

    Raises:
        UserError: it is not there.
    """
    if _is_folder_of_classes(data):
        return {"cls"}
    shards = [shard for source in expand(data) for shard in source]
    if kind_of(shards, config) != "tar":
        return {"text"}
    held = set(shard_index(shards[0], config.sample_key).suffixes.tolist())
    wanted = config.wanted() | config.wanted(label=True)
    return {role for role, endings in wanted.items() if role != "image" and held & set(endings)}


def _is_folder_of_classes(data: str) -> bool:
    return os.path.isdir(data) and not any(Path(data).rglob("*.tar"))


def _share(
    source: Source,
    config: DataConfig,
    assembler: Callable[[list[RawSample], Counter[str]], Any],
    batch_size: int,
    rank: int,
    world_size: int,
    workers: int | None,
) -> FinitePass:
    samples = int(source.shard_samples.sum())
    if config.val_num_samples is not None:
        samples = min(samples, config.val_num_samples)
    start, stop = samples * rank // world_size, samples * (rank + 1) // world_size
    reader = FiniteReader(source, start, stop, batch_size, assembler)
    workers = config.workers if workers is None else workers
    return FinitePass(reader, workers, config.data_timeout, rank, samples)


def _evaluation_source(config: DataConfig, image_input: ImageInput, label: bool) -> Source:
    if config.dataset_type == "synthetic":
        return SyntheticSource(config.val_num_samples or 1000, image_input.size, label)
    if not config.val_data:
        raise UserError("--val-data is missing: name tar shards or a table to evaluate on.")
    if label and _is_folder_of_classes(config.val_data):
        folder = FolderSource(config.val_data)
        if not folder.shard_samples.sum():
            raise UserError(f"{folder.name} holds no labelled picture ({folder.found()}).")
        return folder
    shards = [shard for source in expand(config.val_data) for shard in source]
    return open_source(shards, config, config.wanted(label), first=0)
