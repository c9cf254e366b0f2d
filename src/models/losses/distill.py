"""Distillation: a student learns a frozen teacher's judgement of every image-text combination.

Softmax student and teacher: contrastive relational distillation as in CLIP-KD (Yang et al.,
https://arxiv.org/abs/2307.12732) and open_clip's `DistillClipLoss`. The other combinations are analogous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardclip.models.losses.gather import GlobalBatch
from shardclip.models.losses.normalisers import Normalisers
from shardclip.models.losses.sigmoid import softplus
from shardclip.models.losses.tiles import TILE, GradientSums, Logits, Tile, exact, tiles_of

Kind = Literal["softmax", "sigmoid"]


def distillation(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    batch: GlobalBatch,
    teacher: GlobalBatch,
    teacher_scale: Tensor,
    *,
    logit_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_kind: Kind = "softmax",
    teacher_kind: Kind = "softmax",
    tile: int = TILE,
) -> Tensor:
    """The student's cross-entropy against the teacher's probabilities, over the global batch.

    With z the student's logits, a the teacher's, q what the teacher says:

    - softmax student: the mean over pairs of (H(q over texts, softmax of z over texts) + the same over
      images) / 2; q is the softmax of a for a softmax teacher, sigmoid(a) over its sum for a sigmoid teacher.
    - sigmoid student: the sum over all images x all texts of the binary cross-entropy softplus(z) - q z,
      divided by the number of pairs; q is sigmoid(a) for a sigmoid teacher, the mean of the two softmaxes of
      a for a softmax teacher.

    The teacher's entropy is not subtracted. Without any pair the loss and its gradients are 0. Every rank of
    `batch.group` must call it.

    Args:
        image_features: [I, D] of the student, as given to `gather`; its gradient is complete.
        text_features: [T, D] of the student, likewise.
        logit_scale: [], the student's factor; its gradient is that of the global loss, on every rank.
        batch: what `gather` returned for the student's features.
        teacher: `batch.with_features(...)` of the teacher's features, of any width; no gradient.
        teacher_scale: [], the teacher's factor.
        logit_bias: [], the student's bias; None for 0.
        teacher_bias: [], the teacher's bias; None for 0.
        student_kind: the loss that the student is trained with.
        teacher_kind: the loss that the teacher was trained with.
        tile: side of the squares that the logits are computed in; memory grows with its square.

    Returns:
        [], fp32 (float64 for float64 features): the same value on every rank.

    Raises:
        ValueError: the features are not this rank's part of `batch`, or the teacher's samples are not those
            of the student.
    """
    if (teacher.image_counts, teacher.text_counts) != (batch.image_counts, batch.text_counts):
        raise ValueError("the teacher's features are not of the samples of the student's batch")
    sums = GradientSums(batch, image_features, text_features, logit_scale, logit_bias)
    with exact(image_features.device):
        student = Logits(batch, logit_scale, logit_bias)
        judge = Logits(teacher, teacher_scale, teacher_bias)
        learn = _softmax_student if student_kind == "softmax" else _sigmoid_student
        value = learn(sums, student, judge, teacher_kind, tile)
    return sums.loss(value, batch.per_pair / 2 if student_kind == "softmax" else batch.per_pair)


def _softmax_student(
    sums: GradientSums, student: Logits, judge: Logits, teacher_kind: Kind, size: int
) -> Tensor:
    """[] float64: this rank's part of the loss; its slopes go into `sums`."""
    batch = sums.batch

    def log_judgement(tile: Tile) -> Tensor:
        return judge(tile) if teacher_kind == "softmax" else F.logsigmoid(judge(tile))

    normalisers = Normalisers(batch, student, size)
    learner = normalisers.exchange(only_pairs=True)
    teacher = Normalisers(batch, log_judgement, size).exchange(only_pairs=True)
    value = normalisers.over_pairs(0.0)
    for tile in tiles_of(batch, size, columns=sums.needs.texts):
        logits = student(tile)
        judgement = teacher.probabilities(log_judgement(tile), tile)
        if tile.own_images is not None:
            value -= (judgement * logits).sum()
        sums.add(tile, learner.probabilities(logits, tile).sub_(judgement))
    return value


def _sigmoid_student(
    sums: GradientSums, student: Logits, judge: Logits, teacher_kind: Kind, size: int
) -> Tensor:
    """[] float64: this rank's part of the loss; its slopes go into `sums`."""
    batch = sums.batch
    judgement = (
        _judgement_of_softmax(judge, size) if teacher_kind == "softmax" else _judgement_of_sigmoid(judge)
    )
    value = torch.zeros([], dtype=torch.float64, device=batch.image_features.device)
    for tile in tiles_of(batch, size, columns=sums.needs.texts):
        logits, likely = student(tile), judgement(tile)
        if tile.own_images is not None:
            value += (softplus(logits) - likely * logits).sum()
        sums.add(tile, logits.sigmoid_().sub_(likely))
    return value


def _judgement_of_sigmoid(judge: Logits) -> Callable[[Tile], Tensor]:
    return lambda tile: judge(tile).sigmoid_()


def _judgement_of_softmax(judge: Logits, size: int) -> Callable[[Tile], Tensor]:
    teacher = Normalisers(judge.batch, judge, size).exchange(only_pairs=False)
    return lambda tile: teacher.probabilities(judge(tile), tile).div_(2)
