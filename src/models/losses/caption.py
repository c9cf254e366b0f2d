"""The captioning loss: each token of a caption is predicted from the image and the tokens before it.

Yu et al., "CoCa: Contrastive Captioners are Image-Text Foundation Models", https://arxiv.org/abs/2205.01917.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardclip.models.losses.gather import raised

_ROWS = 256
"""Tokens whose logits are raised to fp32 at a time: 256 x 50,000 words are 50 MB."""


def caption_cross_entropy(logits: Tensor, labels: Tensor, target_tokens: int, *, pad_id: int) -> Tensor:
    """This rank's and micro-batch's share of the mean cross-entropy per target token of the global batch.

    Shares are to be added up, over ranks and micro-batches, gradients alike: a mean per rank would weigh the
    tokens of ranks with short captions more. The gradient takes as much memory as `logits`; nothing else of
    that size is held.

    Args:
        logits: [P, L, V], any floating point; the softmax is taken in fp32 (float64 of float64).
        labels: [P, L] int64: the token that each position is to predict.
        target_tokens: how many labels of the *global* batch, over ranks and micro-batches, are not `pad_id`;
            with 0 the loss is 0.
        pad_id: the label that is not a target.

    Returns:
        [], fp32 (float64 for float64 logits): the local sum over targets, divided by `target_tokens`; 0 with
        a graph if there is no local target.
    """
    total: Tensor = _CrossEntropySum.apply(logits.flatten(0, 1), labels.flatten(), pad_id)
    return total / max(target_tokens, 1)


def count_targets(labels: Tensor, pad_id: int) -> int:
    """The labels [P, L] that are to be predicted; the sum over ranks is the caller's to take."""
    return int((labels != pad_id).sum())


class _CrossEntropySum(torch.autograd.Function):
    """Sum of the cross-entropies of [n, V] logits, raised a few rows at a time in both directions."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, pad_id: int) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.pad_id = pad_id
        total = torch.zeros([], dtype=torch.float64, device=logits.device)
        for rows, wanted in zip(logits.split(_ROWS), labels.split(_ROWS), strict=True):
            total += F.cross_entropy(raised(rows), wanted, ignore_index=pad_id, reduction="sum")
        return total.to(raised(logits[:0]).dtype)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows, wanted, part in zip(
            logits.split(_ROWS), labels.split(_ROWS), gradient.split(_ROWS), strict=True
        ):
            slopes = rows.softmax(1, dtype=outer.dtype)
            targets = wanted != ctx.pad_id
            slopes[torch.arange(len(wanted), device=wanted.device), wanted.where(targets, 0)] -= 1
            part.copy_(slopes.mul_((targets * outer)[:, None]))
        return gradient, None, None
