"""The machinery that all contrastive losses share: logits in tiles, and gradients that are known at once.

A rank owns a cross of the logits [N_i, N_t]: the rows of its images and the columns of its texts. It walks
through the cross in tiles, twice for losses with a softmax (for the normalisers, then for the gradients) and
once for those without, and keeps no tile. The gradient of its features is complete: everything that they take
part in lies in the cross. As each image is owned by one rank, the rows of all ranks hold each logit once;
sums over the global batch (the loss, the gradients of scale and bias) are taken there and added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardclip.models.losses.gather import GlobalBatch

TILE = 1024
"""Side of a tile: 4 MiB in fp32. Twice that costs 38 MB more and was not faster on a CPU
(scripts/bench/loss.py --tile)."""


class Tile(NamedTuple):
    """A rectangle of the logits of the global batch."""

    images: slice
    """Rows: images of the global batch."""
    texts: slice
    """Columns: texts of the global batch."""
    own_images: slice | None
    """The same rows counted from this rank's first image; None if they are another rank's."""
    own_texts: slice | None
    """The same columns counted from this rank's first text; None if they are another rank's."""

    @property
    def may_hold_pairs(self) -> bool:
        """Whether both sides are this rank's: the two sides of a pair are never on different ranks."""
        return self.own_images is not None and self.own_texts is not None


def tiles_of(batch: GlobalBatch, size: int, *, rows: bool = True, columns: bool = True) -> Iterator[Tile]:
    """The rank's cross of logits in tiles of at most `size` x `size`; or only its rows, or its columns."""
    for images, own_images in _pieces(batch.own_images, len(batch.image_features), size):
        for texts, own_texts in _pieces(batch.own_texts, len(batch.text_features), size):
            if (rows and own_images is not None) or (columns and own_texts is not None):
                yield Tile(images, texts, own_images, own_texts)


def _pieces(own: slice, total: int, size: int) -> Iterator[tuple[slice, slice | None]]:
    """Ranges that cover 0 .. total, none partly inside `own`, and their place in `own`."""
    for start, stop in ((0, own.start), (own.start, own.stop), (own.stop, total)):
        parts = max(1, math.ceil((stop - start) / size))
        width = max(1, math.ceil((stop - start) / parts))  # alike, without a sliver at the end
        for first in range(start, stop, width):
            last = min(first + width, stop)
            inside = own.start <= first < own.stop
            yield slice(first, last), slice(first - own.start, last - own.start) if inside else None


@dataclass(frozen=True)
class Logits:
    """The logits of a batch, one tile at a time: scale * <image, text> + bias."""

    batch: GlobalBatch
    """Whose features."""
    scale: Tensor
    """[], taken in the precision of the features, like the bias."""
    bias: Tensor | None = None
    """[]; None for 0."""
    mask_duplicates: bool = False
    """Whether the logits of equal captions of different samples are -inf."""

    def __call__(self, tile: Tile) -> Tensor:
        """[rows, columns] of `tile`, in new memory."""
        batch = self.batch
        images, texts = batch.image_features[tile.images], batch.text_features[tile.texts].T
        scaled = images * self.scale.to(images.dtype)
        logits = (
            scaled @ texts if self.bias is None else torch.addmm(self.bias.to(images.dtype), scaled, texts)
        )
        if self.mask_duplicates:
            equal = batch.image_caption[tile.images, None] == batch.text_caption[None, tile.texts]
            equal &= batch.image_sample[tile.images, None] != batch.text_sample[None, tile.texts]
            logits.masked_fill_(equal, float("-inf"))
        return logits


@dataclass(frozen=True)
class PairsInTile:
    """The rank's pairs as places in a tile, those outside of it marked: no size depends on the data.

    (Choosing them by a boolean index would make a GPU wait for the host.)
    """

    rows: Tensor
    """[p] int64, clamped into the tile."""
    columns: Tensor
    """[p] int64, clamped into the tile."""
    inside: Tensor
    """[p] bool."""

    @classmethod
    def of(cls, batch: GlobalBatch, tile: Tile) -> PairsInTile:
        """The pairs of `batch` that this rank owns, as seen from `tile`."""
        rows, columns = batch.pair_images - tile.images.start, batch.pair_texts - tile.texts.start
        last_row = tile.images.stop - tile.images.start - 1
        last_column = tile.texts.stop - tile.texts.start - 1
        inside = (rows >= 0) & (rows <= last_row) & (columns >= 0) & (columns <= last_column)
        return cls(rows.clamp(0, last_row), columns.clamp(0, last_column), inside)

    def read(self, matrix: Tensor) -> Tensor:
        """[p] the entries at the pairs, 0 for those outside."""
        return torch.where(self.inside, matrix[self.rows, self.columns], 0.0)

    def add(self, matrix: Tensor, values: Tensor | float) -> None:
        """Add [p] `values` to the entries at the pairs, in place."""
        changes = torch.where(self.inside, values, 0.0).to(matrix.dtype)
        matrix.index_put_((self.rows, self.columns), changes, accumulate=True)


class Needs(NamedTuple):
    """Which gradients are asked for."""

    images: bool
    """Those of the image features, or of the scale: that one is had from them."""
    texts: bool
    bias: bool


class GradientSums:
    """A loss in the making: the gradients of a sum over the global batch, added up tile by tile."""

    def __init__(
        self,
        batch: GlobalBatch,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
    ) -> None:
        """Start at 0; raise ValueError unless the features have the shapes of this rank's part of `batch`."""
        counts = (batch.image_counts[batch.rank], batch.text_counts[batch.rank])
        if (len(image_features), len(text_features)) != counts:
            raise ValueError(
                f"{len(image_features)} images and {len(text_features)} texts are given, but this rank's "
                f"part of the batch is {counts[0]} and {counts[1]}: gather() must see the same features"
            )
        self.batch = batch
        self.inputs = (image_features, text_features, logit_scale, logit_bias)
        image, text, scale, bias = (
            torch.is_grad_enabled() and given is not None and given.requires_grad for given in self.inputs
        )
        self.needs = Needs(image or scale, text, bias)
        like, width = batch.image_features, batch.image_features.shape[1]
        self.images = like.new_zeros(counts[0] if self.needs.images else 0, width)
        self.texts = like.new_zeros(counts[1] if self.needs.texts else 0, width)
        self.bias = like.new_zeros([], dtype=torch.float64)

    def add(self, tile: Tile, slopes: Tensor) -> None:
        """Take in the derivatives of the sum by the logits of a tile, [rows, columns]."""
        if tile.own_images is not None and self.needs.images:
            self.images[tile.own_images].addmm_(slopes, self.batch.text_features[tile.texts])
        if tile.own_texts is not None and self.needs.texts:
            self.texts[tile.own_texts].addmm_(slopes.T, self.batch.image_features[tile.images])
        if tile.own_images is not None and self.needs.bias:
            self.bias += slopes.sum()

    def loss(self, value: Tensor, weight: float) -> Tensor:
        """[]: `weight` * the sum over ranks of `value` ([] float64), with the gradients that were added.

        One all-reduce of three numbers, which is issued whatever is needed: ranks cannot fall out of step.
        """
        own = self.batch.image_features[self.batch.own_images]
        # The sum over logits of slope * <image, text>: the products with the texts are already summed.
        by_scale = (own * self.images).sum(dtype=torch.float64) if self.needs.images else self.bias * 0
        totals = self.batch.total(torch.stack([value, by_scale, self.bias])) * weight
        total = totals[0].to(own.dtype)
        if not any(self.needs):
            return total
        factor = self.inputs[2].detach().to(own.dtype) * weight
        gradients = (self.images.mul_(factor), self.texts.mul_(factor), totals[1], totals[2])
        return _KnownGradients.apply(total, gradients, *self.inputs)


class _KnownGradients(torch.autograd.Function):
    """A number whose gradients were computed with it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor | None) -> Tensor:
        wanted = [
            gradient.to(given.dtype).reshape(given.shape) if needed and given is not None else None
            for gradient, given, needed in zip(gradients, inputs, ctx.needs_input_grad[2:], strict=True)
        ]
        ctx.save_for_backward(*wanted)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scaled = (None if g is None else (outer * g).to(g.dtype) for g in ctx.saved_tensors)
        return None, None, *scaled


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """No graph, and no autocast: it would take the matrix products in bf16."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
