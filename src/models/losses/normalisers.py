"""Softmaxes over the whole batch of logits that exist one tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardclip.models.losses.gather import GlobalBatch
from shardclip.models.losses.tiles import PairsInTile, Tile, tiles_of


class RunningSum:
    """The log-sum-exp of n rows, taken in piece by piece: Milakov and Gimelshein, "Online normalizer
    calculation for softmax", https://arxiv.org/abs/1805.02867.

    Largest logit and sum are kept apart. Their one number, peak + log(total), would be rounded to 4e-6 where
    logits are near 100: three times the error of everything else in the gradient of a trained model.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        self.peak = like.new_full([rows], torch.finfo(like.dtype).min)
        self.total = like.new_zeros([rows])

    def take(self, own: slice, logits: Tensor, dim: int) -> None:
        """Rows `own` get the logits along `dim`."""
        peak = torch.maximum(self.peak[own], logits.amax(dim))
        share = (logits - peak.unsqueeze(dim)).exp_().sum(dim)
        self.total[own] = share.addcmul_(self.total[own], (self.peak[own] - peak).exp_())
        self.peak[own] = peak


@dataclass(frozen=True)
class Softmaxes:
    """The softmax of every image over the texts, and of every text over the images, of the global batch."""

    images: Tensor
    """[N_i, 2]: of each image the largest logit and the factor of the exponentials above it."""
    texts: Tensor
    """[N_t, 2]: the same of each text."""

    def probabilities(self, logits: Tensor, tile: Tile) -> Tensor:
        """Softmax over texts + softmax over images, [rows, columns]; `logits` is used up."""
        by_image, by_text = self.images[tile.images, :, None], self.texts[tile.texts]
        both = (logits - by_image[:, 0]).exp_().mul_(by_image[:, 1])
        return both.addcmul_(logits.sub_(by_text[:, 0]).exp_(), by_text[:, 1])


class Normalisers:
    """The log-sum-exp of the own images' logits over all texts, and of the own texts' over all images."""

    def __init__(self, batch: GlobalBatch, logits: Callable[[Tile], Tensor], size: int) -> None:
        """Walk through this rank's cross of logits in tiles of `size`; no collective."""
        like = batch.image_features
        self.batch = batch
        self.images = RunningSum(batch.image_counts[batch.rank], like)
        self.texts = RunningSum(batch.text_counts[batch.rank], like)
        self.pairs = like.new_zeros(len(batch.pair_images))
        """[p]: the logits of the rank's pairs."""
        for tile in tiles_of(batch, size):
            scores = logits(tile)
            if tile.own_images is not None:
                self.images.take(tile.own_images, scores, 1)
            if tile.own_texts is not None:
                self.texts.take(tile.own_texts, scores, 0)
            if tile.may_hold_pairs:
                self.pairs += PairsInTile.of(batch, tile).read(scores)

    def over_pairs(self, base: Tensor | float) -> Tensor:
        """[] float64: the sum over this rank's pairs of both log-sum-exps, each less `base` ([p])."""
        total = torch.zeros([], dtype=torch.float64, device=self.pairs.device)
        for side, rows in ((self.images, self._pair_rows[0]), (self.texts, self._pair_rows[1])):
            total += ((side.peak[rows] - base) + side.total[rows].log()).sum(dtype=torch.float64)
        return total

    def exchange(self, *, only_pairs: bool) -> Softmaxes:
        """The softmaxes of all ranks: one collective, of 2 floats per image and text.

        With `only_pairs` the probabilities of images without a text, and of texts without an image, are 0.
        """
        columns = []
        for side, rows in ((self.images, self._pair_rows[0]), (self.texts, self._pair_rows[1])):
            factor = side.total.reciprocal()
            if only_pairs:
                factor = torch.zeros_like(factor).index_copy_(0, rows, factor[rows])
            columns.append(torch.stack([side.peak, factor], dim=1))
        return Softmaxes(*self.batch.exchange(*columns))

    @property
    def _pair_rows(self) -> tuple[Tensor, Tensor]:
        return self.batch.pair_images - self.batch.image_start, self.batch.pair_texts - self.batch.text_start
