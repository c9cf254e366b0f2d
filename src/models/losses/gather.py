"""What every rank must know of the others' samples to have the complete gradient of its own.

Features are exchanged once per step and without autograd: a rank that holds all features, and the row and
column sums of the logits, computes the complete gradient of its own features by itself (design.md 3). So
nothing of size [N, D] travels back, and no averaging has to be undone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardclip.models.transfer import sent


class RankCounts(NamedTuple):
    """What each rank holds of a global batch, in rank order."""

    images: tuple[int, ...]
    texts: tuple[int, ...]
    samples: tuple[int, ...]
    pairs: tuple[int, ...]
    """Samples with both sides."""


@dataclass(frozen=True)
class GlobalBatch:
    """The features of all ranks, in rank order, and which samples they belong to."""

    image_features: Tensor
    """[N_i, D] fp32 (float64 if that was given), without graph."""
    text_features: Tensor
    """[N_t, D], like `image_features`."""
    image_sample: Tensor
    """[N_i] int64: the sample that each image belongs to, numbered over all ranks."""
    text_sample: Tensor
    """[N_t] int64: the sample that each text belongs to."""
    image_caption: Tensor
    """[N_i] int64: id of the caption of the image's sample; its own, unique id if that has none."""
    text_caption: Tensor
    """[N_t] int64: id of the caption."""
    image_counts: tuple[int, ...]
    """Images of each rank."""
    text_counts: tuple[int, ...]
    """Texts of each rank."""
    image_start: int
    """This rank's first row of `image_features`."""
    text_start: int
    """This rank's first row of `text_features`."""
    pair_images: Tensor
    """[p] int64: rows of `image_features` that are this rank's and have a text."""
    pair_texts: Tensor
    """[p] int64: the rows of `text_features` that belong to `pair_images`."""
    pairs: int
    """Samples with both sides, over all ranks."""
    rank: int
    """This rank in `group`."""
    group: ProcessGroup | None
    """The ranks that share the batch; None for the default group, or for a single process."""

    @property
    def own_images(self) -> slice:
        """This rank's rows of `image_features`."""
        return slice(self.image_start, self.image_start + self.image_counts[self.rank])

    @property
    def own_texts(self) -> slice:
        """This rank's rows of `text_features`."""
        return slice(self.text_start, self.text_start + self.text_counts[self.rank])

    @property
    def per_pair(self) -> float:
        """What turns a sum over the global batch into a mean over its pairs; 0 without any."""
        return 1 / self.pairs if self.pairs else 0.0

    def exchange(self, image_values: Tensor, text_values: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the own images [I, k] and texts [T, k] -> those of all ranks, [N_i, k] and [N_t, k]."""
        return _gather_sides(image_values, text_values, self.image_counts, self.text_counts, self.group)

    @torch.no_grad()
    def with_features(self, image_features: Tensor, text_features: Tensor) -> GlobalBatch:
        """The same samples with another model's local features [I, E] and [T, E] in place of these."""
        return replace(
            self,
            image_features=raised(_gather_rows(image_features.detach(), self.image_counts, self.group)),
            text_features=raised(_gather_rows(text_features.detach(), self.text_counts, self.group)),
        )

    def total(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks, in place; the same bits on every rank."""
        if len(self.image_counts) > 1:
            dist.all_reduce(values, group=self.group)
        return values


@torch.no_grad()
def gather(
    image_features: Tensor,
    text_features: Tensor,
    image_sample: Tensor,
    text_sample: Tensor,
    caption_id: Tensor,
    group: ProcessGroup | None = None,
    *,
    counts: RankCounts | None = None,
) -> GlobalBatch:
    """Exchange the features of one step. Every rank of the group must call it, whatever it holds.

    The ranks may hold different numbers of images and texts, none included. Four collectives at most: the
    counts, the features of each side (in the precision given, padded to the largest rank), the ids. With
    `counts`, and with what names samples on the CPU, the host does not wait for the features.

    Args:
        image_features: [I, D], floating point, L2-normalised.
        text_features: [T, D], likewise.
        image_sample: [I] int64: the sample (0 .. B-1 of this rank) of each image; no sample has two.
        text_sample: [T] int64: the same for the texts.
        caption_id: [B] int64: equal for equal captions; -1 for a sample without one.
        group: the ranks that share the global batch. None means the default group if `torch.distributed` is
            initialised, else a single process.
        counts: what every rank holds, where that is known already; exchanged if not given.

    Raises:
        ValueError: features and sample numbers differ in length.
    """
    if len(image_features) != len(image_sample) or len(text_features) != len(text_sample):
        raise ValueError(
            f"{len(image_features)} images with {len(image_sample)} sample numbers, "
            f"{len(text_features)} texts with {len(text_sample)}"
        )
    device, (rank, _) = image_features.device, _place(group)
    pair_images, pair_texts = pair_rows(image_sample, text_sample, len(caption_id))
    local = (len(image_sample), len(text_sample), len(caption_id), len(pair_images))
    counts = counts or _exchanged_counts(local, device, group)
    image_start, text_start = sum(counts.images[:rank]), sum(counts.texts[:rank])

    ids = _ids(caption_id, sum(counts.samples[:rank]))
    of_images, of_texts = sent(ids[image_sample], device), sent(ids[text_sample], device)
    image_ids, text_ids = _gather_sides(of_images, of_texts, counts.images, counts.texts, group)
    return GlobalBatch(
        image_features=raised(_gather_rows(image_features.detach(), counts.images, group)),
        text_features=raised(_gather_rows(text_features.detach(), counts.texts, group)),
        image_sample=image_ids[:, 0],
        text_sample=text_ids[:, 0],
        image_caption=image_ids[:, 1],
        text_caption=text_ids[:, 1],
        image_counts=counts.images,
        text_counts=counts.texts,
        image_start=image_start,
        text_start=text_start,
        pair_images=sent(pair_images + image_start, device),
        pair_texts=sent(pair_texts + text_start, device),
        pairs=sum(counts.pairs),
        rank=rank,
        group=group,
    )


@torch.no_grad()
def duplicate_rate(batch: GlobalBatch) -> Tensor:
    """[] fp32: the share of the global batch's samples whose caption occurs more than once; no collective."""
    captions = batch.text_caption.sort().values
    equal = captions[1:] == captions[:-1]
    edge = equal.new_zeros(1)
    repeated = torch.cat([edge, equal]) | torch.cat([equal, edge])
    samples = len(batch.image_sample) + len(batch.text_sample) - batch.pairs
    return repeated.sum().float() / max(samples, 1)


def raised(values: Tensor) -> Tensor:
    """`values` in the precision of the losses: fp32, or float64 if they are."""
    return values if values.dtype == torch.float64 else values.float()


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def _ids(caption_id: Tensor, first: int) -> Tensor:
    """[B, 2] int64: number over all ranks, counted from `first`, and caption of each sample."""
    samples = torch.arange(len(caption_id), device=caption_id.device) + first
    # Hashes of captions are not negative: a negative id belongs to one sample and meets no other.
    return torch.stack([samples, torch.where(caption_id == -1, -2 - samples, caption_id)], dim=1)


def _exchanged_counts(local: tuple[int, ...], device: torch.device, group: ProcessGroup | None) -> RankCounts:
    table = _gather_rows(sent(torch.tensor([local]), device), [1] * _place(group)[1], group).tolist()
    return RankCounts(*zip(*table, strict=True))


def pair_rows(image_sample: Tensor, text_sample: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The rows of the images that have a text, and the rows of those texts, [p] int64 each.

    Args:
        image_sample: [I] int64: the sample (0 .. `samples` - 1) of each image; no sample has two.
        text_sample: [T] int64: the same for the texts.
        samples: how many there are.
    """
    rows = torch.full([samples], -1, device=text_sample.device)
    rows[text_sample] = torch.arange(len(text_sample), device=text_sample.device)
    text_of_image = rows[image_sample]
    pair_images = (text_of_image >= 0).nonzero().squeeze(1)
    return pair_images, text_of_image[pair_images]


def _gather_sides(
    images: Tensor,
    texts: Tensor,
    image_counts: tuple[int, ...],
    text_counts: tuple[int, ...],
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Rows of this rank's images and texts -> those of all ranks, in one collective."""
    sizes = [i + t for i, t in zip(image_counts, text_counts, strict=True)]
    ranks = _gather_rows(torch.cat([images, texts]), sizes, group).split(sizes)
    of_images = [rows[:count] for rows, count in zip(ranks, image_counts, strict=True)]
    of_texts = [rows[count:] for rows, count in zip(ranks, image_counts, strict=True)]
    return torch.cat(of_images), torch.cat(of_texts)


def _gather_rows(rows: Tensor, counts: tuple[int, ...] | list[int], group: ProcessGroup | None) -> Tensor:
    """The rows [n, ...] of all ranks in rank order; rank r has `counts[r]` of them."""
    most = max(counts)
    if len(counts) == 1 or most == 0:
        return rows
    if len(rows) < most:
        rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    gathered = rows.new_empty(most * len(counts), *rows.shape[1:])
    dist.all_gather_single(gathered, rows.contiguous(), group=group)
    if min(counts) == most:
        return gathered
    return torch.cat([part[:count] for part, count in zip(gathered.split(most), counts, strict=True)])
