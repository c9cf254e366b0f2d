"""What the data side hands to the training step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass
class Batch:
    """The samples of one rank for one step (or, after `split`, of one micro-batch).

    A sample may lack a side (an unpaired sample), so images and texts are stored without holes and each
    says which of the batch's samples it belongs to.
    """

    images: Tensor
    """[I, 3, H, W] uint8."""
    texts: Tensor
    """[T, L] int64 token ids."""
    image_sample: Tensor
    """[I] int64, ascending: the sample (0 .. B-1) that each image belongs to."""
    text_sample: Tensor
    """[T] int64, ascending: the sample that each text belongs to."""
    caption_id: Tensor
    """[B] int64: hash of the caption (equal captions, equal ids), -1 for a sample without one."""
    keys: list[str]
    """[B] where each sample came from ("shard.tar:key"), for messages."""
    state: dict[str, Any] = field(default_factory=dict)
    """The loader's position after this batch: what a checkpoint saves."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Samples left out since the previous batch, by reason."""
    repeated: int = 0
    """Samples of the batch that the run has met before."""

    @property
    def samples(self) -> int:
        """B, the number of samples."""
        return len(self.keys)

    def split(self, parts: int) -> list[Batch]:
        """`parts` micro-batches of consecutive samples, renumbered from 0; views. For a batch on the CPU.

        Sizes differ by one at most; with fewer samples than parts some are empty, so that every rank has
        the same number of micro-batches.
        """
        if parts == 1:
            return [self]
        edges = [self.samples * part // parts for part in range(parts + 1)]
        return [self._slice(start, stop) for start, stop in pairwise(edges)]

    def _slice(self, start: int, stop: int) -> Batch:
        edges = torch.tensor([start, stop])
        images, texts = (
            slice(*torch.searchsorted(numbers, edges).tolist())
            for numbers in (self.image_sample, self.text_sample)
        )
        return Batch(
            images=self.images[images],
            texts=self.texts[texts],
            image_sample=self.image_sample[images] - start,
            text_sample=self.text_sample[texts] - start,
            caption_id=self.caption_id[start:stop],
            keys=self.keys[start:stop],
        )


def concatenate(batches: list[Batch], pin_memory: bool = False) -> Batch:
    """One batch of the samples of several, in order; position is that of the last, counts are sums.

    `pin_memory`: with pixels that a GPU copies by itself.
    """
    if len(batches) == 1:
        return replace(batches[0], images=batches[0].images.pin_memory()) if pin_memory else batches[0]
    offsets = [0]
    for batch in batches:
        offsets.append(offsets[-1] + batch.samples)
    skipped: dict[str, int] = {}
    for batch in batches:
        for reason, count in batch.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    return Batch(
        images=_joined([batch.images for batch in batches], pin_memory),
        texts=torch.cat([batch.texts for batch in batches]),
        image_sample=torch.cat([b.image_sample + o for b, o in zip(batches, offsets, strict=False)]),
        text_sample=torch.cat([b.text_sample + o for b, o in zip(batches, offsets, strict=False)]),
        caption_id=torch.cat([batch.caption_id for batch in batches]),
        keys=[key for batch in batches for key in batch.keys],
        state=batches[-1].state,
        skipped=skipped,
        repeated=sum(batch.repeated for batch in batches),
    )


def _joined(parts: list[Tensor], pin_memory: bool) -> Tensor:
    rows = sum(map(len, parts))
    whole = torch.empty(rows, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=pin_memory)
    return torch.cat(parts, out=whole)
