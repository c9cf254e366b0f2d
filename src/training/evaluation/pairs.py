"""Validation pairs through both towers, to retrieval figures and a loss that depend on the data alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardclip.errors import UserError
from shardclip.models.transfer import sent
from shardclip.training.data.batch import Batch
from shardclip.training.distributed import Processes
from shardclip.training.evaluation.lockstep import first_known, lockstep
from shardclip.training.evaluation.retrieval import Side, retrieval
from shardclip.training.evaluation.undisturbed import undisturbed


@dataclass
class EncodedPairs:
    """The samples of this rank after both towers, numbered among those of all ranks by their keys."""

    images: Side
    texts: Side
    logit_scale: float
    keys: list[str]
    """[n] of the samples, in the order in which they were read."""
    places: list[tuple[int, int]]
    """[n] the number of the batch that each came in, and its row there."""
    numbers: Tensor
    """[n] int64, the place of each among the keys of all ranks."""


def evaluate_pairs(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    normalise: Callable[[Tensor], Tensor],
    processes: Processes,
    device: torch.device | None = None,
    chunk_size: int = 4096,
) -> tuple[dict[str, float], EncodedPairs]:
    """Retrieval both ways and the validation loss; see `retrieval` for what each figure means.

    Samples are numbered by their keys, so ties are settled alike however the samples lie over the ranks.

    Args:
        model: a `DualEncoder`, plain or wrapped by DDP or FSDP; every rank calls this.
        batches: this rank's samples; no sample on two ranks.
        normalise: uint8 pictures, on the device, to what the image tower wants.
        processes: the ranks.
        device: where the model is; None means the device of `processes`.
        chunk_size: candidates per tile of scores.

    Returns:
        What `retrieval` returns, and `samples`, `images`, `texts`: how many there were on all ranks; and the
        features that they were made of.

    Raises:
        UserError: no sample has both an image and a text.
    """
    encoded = _encode(model, batches, normalise, processes, device or processes.device)
    metrics = retrieval(
        encoded.images, encoded.texts, encoded.logit_scale, processes=processes, chunk_size=chunk_size
    )
    counts = (len(part) for part in (encoded.keys, encoded.images.sample, encoded.texts.sample))
    totals = (sum(column) for column in zip(*processes.all_gather_object(tuple(counts)), strict=True))
    return metrics | dict(zip(("samples", "images", "texts"), totals, strict=True)), encoded


def _encode(
    model: nn.Module,
    batches: Iterable[Batch],
    normalise: Callable[[Tensor], Tensor],
    processes: Processes,
    device: torch.device,
) -> EncodedPairs:
    images, texts = _Collector(), _Collector()
    keys: list[str] = []
    places: list[tuple[int, int]] = []
    shapes: tuple[torch.Size, torch.Size] | None = None
    scale: Tensor | float = 1.0
    with undisturbed(model, processes) as encoder:
        for turn, batch in enumerate(lockstep(batches, processes, "validation pairs")):
            if shapes is None:
                own = None if batch is None else (batch.images.shape[1:], batch.texts.shape[1:])
                shapes = first_known(own, processes)
            assert shapes is not None
            pixels = _or_blank(None if batch is None else batch.images, shapes[0], torch.uint8)
            captions = _or_blank(None if batch is None else batch.texts, shapes[1], torch.int64)
            encoded = encoder(normalise(sent(pixels, device)), encoder.text_input(captions, device))
            scale = encoded.logit_scale
            if batch is not None:
                images.add(encoded.image_features, batch.images, batch.image_sample + len(keys))
                texts.add(encoded.text_features, batch.texts, batch.text_sample + len(keys))
                keys += batch.keys
                places += [(turn, row) for row in range(batch.samples)]
    if shapes is None:
        raise UserError("validation data: no sample was read on any rank")
    width = first_known(images.width, processes)
    numbers = _numbers(keys, processes)
    image_side, text_side = (c.side(numbers, width, processes, device) for c in (images, texts))
    return EncodedPairs(image_side, text_side, float(scale), keys, places, numbers)


def _or_blank(rows: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The rows, or one blank row if there are none: both towers run on every rank at every turn."""
    return torch.zeros(1, *shape, dtype=dtype) if rows is None or len(rows) == 0 else rows


def _numbers(keys: list[str], processes: Processes) -> Tensor:
    """[n] int64: the place of each of this rank's samples in the order of the keys of all ranks."""
    gathered = processes.all_gather_object(keys)
    places = sorted((key, rank, row) for rank, keys in enumerate(gathered) for row, key in enumerate(keys))
    numbers = torch.empty(len(keys), dtype=torch.int64)
    for number, (_, rank, row) in enumerate(places):
        if rank == processes.rank:
            numbers[row] = number
    return numbers


class _Collector:
    """The rows of one side, batch by batch."""

    def __init__(self) -> None:
        self._features: list[Tensor] = []
        self._samples: list[Tensor] = []
        self._prints: list[int] = []

    @property
    def width(self) -> int | None:
        """D; None before the first batch."""
        return self._features[0].shape[1] if self._features else None

    def add(self, features: Tensor, inputs: Tensor, samples: Tensor) -> None:
        """Keep the features of `inputs`, leaving out the blank row that stood for none."""
        self._features.append(features[: len(inputs)])
        self._samples.append(samples)
        self._prints += [_fingerprint(row) for row in inputs]

    def side(self, numbers: Tensor, width: int, processes: Processes, device: torch.device) -> Side:
        """The rows ascending by number, equal inputs with equal features."""
        if not self._features:
            self._features = [torch.zeros(0, width, device=device)]
            self._samples = [torch.zeros(0, dtype=torch.int64)]
        samples, order = numbers[torch.cat(self._samples)].sort(stable=True)
        side = Side(torch.cat(self._features)[order.to(device)], samples.to(device))
        prints = [self._prints[row] for row in order.tolist()]
        _share_equal(side, prints, processes)
        return side


def _fingerprint(row: Tensor) -> int:
    digest = hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _share_equal(side: Side, prints: list[int], processes: Processes) -> None:
    """Give equal inputs (a caption that occurs twice) the features of the first of them, in place.

    A matrix product may round differently in a batch of another size. Between equal inputs that alone would
    decide who ranks first, and the figures would depend on how the samples lie in batches and on ranks.
    """
    gathered = processes.all_gather_object(list(zip(prints, side.order.tolist(), strict=True)))
    every = [entry for entries in gathered for entry in entries]
    occurrences = Counter(print_ for print_, _ in every)
    first: dict[int, int] = {}
    for print_, order in sorted((entry for entry in every if occurrences[entry[0]] > 1), key=lambda e: e[1]):
        first.setdefault(print_, order)
    own = {
        print_: side.features[row].cpu()
        for row, (print_, order) in enumerate(zip(prints, side.order.tolist(), strict=True))
        if first.get(print_) == order
    }
    shared = {
        print_: features for part in processes.all_gather_object(own) for print_, features in part.items()
    }
    rows = [row for row, print_ in enumerate(prints) if print_ in shared]
    if rows:
        values = torch.stack([shared[prints[row]] for row in rows])
        side.features[rows] = values.to(side.features.device)
