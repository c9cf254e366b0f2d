"""The losses as one process would write them: whole matrices and autograd, on the concatenated batch."""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardclip.models.losses.distill import distillation as distillation_loss
from shardclip.models.losses.gather import gather
from shardclip.models.losses.sigmoid import sigmoid_contrastive
from shardclip.models.losses.softmax import softmax_contrastive

WIDTH = 6


@dataclass
class Part:
    """One rank's samples: what it gives to `gather`, for a student and a teacher."""

    image_features: Tensor
    text_features: Tensor
    image_sample: Tensor
    text_sample: Tensor
    caption_id: Tensor
    teacher_image_features: Tensor
    teacher_text_features: Tensor


def parts(layout: list[str], captions: int = 5, dtype: torch.dtype = torch.float64) -> list[Part]:
    """A global batch: per rank one letter a sample, P a pair, I an image alone, T a text alone.

    Captions repeat after `captions` texts, so that there are duplicates within and between ranks. Rows are
    not in the order of the samples.
    """
    generator = torch.Generator().manual_seed(1)

    def features(rows: int, width: int) -> Tensor:
        return F.normalize(torch.randn(rows, width, generator=generator, dtype=torch.float64), dim=-1).to(
            dtype
        )

    made, texts = [], 0
    for letters in layout:
        image_sample = torch.tensor([n for n, kind in enumerate(letters) if kind in "PI"], dtype=torch.int64)
        text_sample = torch.tensor([n for n, kind in enumerate(letters) if kind in "PT"], dtype=torch.int64)
        image_sample = image_sample[torch.randperm(len(image_sample), generator=generator)]
        caption_id = torch.full([len(letters)], -1)
        caption_id[text_sample] = torch.arange(texts, texts + len(text_sample)) % captions
        texts += len(text_sample)
        made.append(
            Part(
                features(len(image_sample), WIDTH),
                features(len(text_sample), WIDTH),
                image_sample,
                text_sample,
                caption_id,
                features(len(image_sample), WIDTH + 3),
                features(len(text_sample), WIDTH + 3),
            )
        )
    return made


@dataclass
class Whole:
    """All ranks' samples on one process."""

    images: Tensor
    texts: Tensor
    teacher_images: Tensor
    teacher_texts: Tensor
    paired: Tensor
    """[N_i, N_t] bool: the two sides of one sample."""
    duplicate: Tensor
    """[N_i, N_t] bool: equal captions of different samples."""


def whole(ranks: list[Part]) -> Whole:
    """The concatenated batch."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in ranks])

    def labels(side: str) -> list[tuple[int, int, int]]:
        return [
            (rank, int(sample), int(part.caption_id[sample]))
            for rank, part in enumerate(ranks)
            for sample in getattr(part, side)
        ]

    image_labels, text_labels = labels("image_sample"), labels("text_sample")
    shape = (len(image_labels), len(text_labels))
    paired = torch.tensor([[i[:2] == t[:2] for t in text_labels] for i in image_labels], dtype=torch.bool)
    same = torch.tensor([[i[2] == t[2] != -1 for t in text_labels] for i in image_labels], dtype=torch.bool)
    paired, same = paired.reshape(shape), same.reshape(shape)
    return Whole(
        joined("image_features"),
        joined("text_features"),
        joined("teacher_image_features"),
        joined("teacher_text_features"),
        paired,
        same & ~paired,
    )


def softmax(batch: Whole, images: Tensor, texts: Tensor, scale: Tensor, masked: bool) -> Tensor:
    """Mean over pairs of the two cross-entropies; all other rows and columns are negatives."""
    logits = scale * images @ texts.T
    if masked:
        logits = logits.masked_fill(batch.duplicate, -torch.inf)
    rows, columns = batch.paired.nonzero(as_tuple=True)
    by_image = F.cross_entropy(logits[rows], columns, reduction="sum") if len(rows) else 0
    by_text = F.cross_entropy(logits.T[columns], rows, reduction="sum") if len(rows) else 0
    return (by_image + by_text) / (2 * max(len(rows), 1)) + 0 * (images.sum() + texts.sum() + scale)


def sigmoid(batch: Whole, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor, masked: bool) -> Tensor:
    """Sum over all combinations of -log sigmoid(+-logit), per pair."""
    logits = scale * images @ texts.T + bias
    losses = -F.logsigmoid(torch.where(batch.paired, logits, -logits))
    if masked:
        losses = losses * ~batch.duplicate
    pairs = int(batch.paired.sum())
    return losses.sum() * (1 / pairs if pairs else 0)


def distillation(
    batch: Whole,
    images: Tensor,
    texts: Tensor,
    scale: Tensor,
    bias: Tensor,
    teacher_scale: Tensor,
    teacher_bias: Tensor,
    student: str,
    teacher: str,
) -> Tensor:
    """Cross-entropies against the teacher, as the docstring of `shardclip.models.losses.distill` has them."""
    logits = scale * images @ texts.T + bias
    judgement = teacher_scale * batch.teacher_images @ batch.teacher_texts.T + teacher_bias
    pairs = int(batch.paired.sum())
    if pairs == 0:
        return 0 * logits.sum()
    if student == "sigmoid":
        likely = (
            judgement.sigmoid() if teacher == "sigmoid" else (judgement.softmax(0) + judgement.softmax(1)) / 2
        )
        return F.binary_cross_entropy_with_logits(logits, likely, reduction="sum") / pairs
    by_image, by_text = (
        (judgement.sigmoid() / judgement.sigmoid().sum(dim, keepdim=True))
        if teacher == "sigmoid"
        else judgement.softmax(dim)
        for dim in (1, 0)
    )
    rows, columns = batch.paired.any(1), batch.paired.any(0)
    over_texts = -(by_image * logits.log_softmax(1)).sum(1)[rows].sum()
    over_images = -(by_text * logits.log_softmax(0)).sum(0)[columns].sum()
    return (over_texts + over_images) / (2 * pairs)


LOSSES: dict[str, dict[str, Any]] = {
    "softmax": {"masked": False},
    "softmax, masked": {"masked": True},
    "sigmoid": {"masked": False},
    "sigmoid, masked": {"masked": True},
    "distill softmax from softmax": {"student": "softmax", "teacher": "softmax"},
    "distill softmax from sigmoid": {"student": "softmax", "teacher": "sigmoid"},
    "distill sigmoid from softmax": {"student": "sigmoid", "teacher": "softmax"},
    "distill sigmoid from sigmoid": {"student": "sigmoid", "teacher": "sigmoid"},
}
SCALE, BIAS, TEACHER_SCALE, TEACHER_BIAS = 9.0, -2.5, 12.0, -3.0


@dataclass
class Outcome:
    """A loss and its gradients (those of the features may be one rank's)."""

    value: Tensor
    images: Tensor
    texts: Tensor
    scale: Tensor
    bias: Tensor


def expected(ranks: list[Part], loss: str) -> Outcome:
    """What the loss must be on `ranks`, by autograd on the concatenated batch."""
    batch = whole(ranks)
    images, texts = batch.images.requires_grad_(), batch.texts.requires_grad_()
    scale, bias, *teacher = (
        torch.tensor(value, dtype=images.dtype, requires_grad=True)
        for value in (SCALE, BIAS, TEACHER_SCALE, TEACHER_BIAS)
    )
    options = LOSSES[loss]
    if loss.startswith("softmax"):
        value = softmax(batch, images, texts, scale, **options) + 0 * bias
    elif loss.startswith("sigmoid"):
        value = sigmoid(batch, images, texts, scale, bias, **options)
    else:
        value = distillation(batch, images, texts, scale, bias, *teacher, **options)
    value.backward()
    return Outcome(value.detach(), *(leaf.grad for leaf in (images, texts, scale, bias)))


def ours(part: Part, loss: str, tile: int) -> Outcome:
    """The same by `shardclip.models.losses`, on one rank (or, without a process group, on one process)."""
    batch = gather(
        part.image_features, part.text_features, part.image_sample, part.text_sample, part.caption_id
    )
    images = part.image_features.clone().requires_grad_()
    texts = part.text_features.clone().requires_grad_()
    scale, bias, teacher_scale, teacher_bias = (
        torch.tensor(value, dtype=images.dtype, requires_grad=True)
        for value in (SCALE, BIAS, TEACHER_SCALE, TEACHER_BIAS)
    )
    options = LOSSES[loss]
    if loss.startswith("softmax"):
        value = softmax_contrastive(
            images, texts, scale, batch, logit_bias=bias, mask_duplicates=options["masked"], tile=tile
        )
    elif loss.startswith("sigmoid"):
        value = sigmoid_contrastive(
            images, texts, scale, bias, batch, mask_duplicates=options["masked"], tile=tile
        )
    else:
        value = distillation_loss(
            images,
            texts,
            scale,
            batch,
            batch.with_features(part.teacher_image_features, part.teacher_text_features),
            teacher_scale,
            logit_bias=bias,
            teacher_bias=teacher_bias,
            student_kind=options["student"],
            teacher_kind=options["teacher"],
            tile=tile,
        )
    value.backward()
    return Outcome(value.detach(), *(leaf.grad for leaf in (images, texts, scale, bias)))


def joined(outcomes: list[Outcome]) -> Outcome:
    """The ranks' outcomes as one; what must be the same on every rank is asserted to be, bit for bit."""
    for name in ("value", "scale", "bias"):
        assert len({getattr(outcome, name).item() for outcome in outcomes}) == 1, name
    images, texts = (torch.cat([getattr(o, side) for o in outcomes]) for side in ("images", "texts"))
    return Outcome(outcomes[0].value, images, texts, outcomes[0].scale, outcomes[0].bias)


def assert_equal(actual: Outcome, wanted: Outcome, tolerance: float) -> None:
    """Value and every gradient within `tolerance`, relative to the size of each."""
    for field in fields(Outcome):
        is_, should = getattr(actual, field.name), getattr(wanted, field.name)
        error, size = torch.linalg.vector_norm(is_ - should), torch.linalg.vector_norm(should)
        assert is_.shape == should.shape, field.name
        assert error <= tolerance * max(size, 1e-3), f"{field.name}: off by {error:.3e} of {size:.3e}"
