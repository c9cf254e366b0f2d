"""Similarities in full fp32, and the one rule by which they rank."""

from __future__ import annotations

import torch
from torch import Tensor


def similarity(queries: Tensor, candidates: Tensor) -> Tensor:
    """Dot products [Q, C] of queries [Q, D] and candidates [C, D], fp32 whatever the run's precision.

    TF32 keeps 10 bits of the mantissa and autocast 7: enough to reorder a ranking.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(queries.device.type, enabled=False):
            return queries.float() @ candidates.float().T
    finally:
        torch.set_float32_matmul_precision(precision)


def count_ahead(scores: Tensor, target_score: Tensor, target_order: Tensor, order: Tensor) -> Tensor:
    """How many candidates rank before each query's target: its rank, counted from 0.

    A candidate ranks before the target if its score is higher, or equal and its order number lower. (An
    argsort leaves ties to the implementation; a model that gives everything one score would rank well.)

    Args:
        scores: [Q, C].
        target_score: [Q].
        target_order: [Q] int64, the target's order number.
        order: [C] int64, the candidates' order numbers.

    Returns:
        [Q] int64.
    """
    # Comparisons written as floats: summing booleans takes torch several times as long.
    compared = torch.empty_like(scores)
    higher = torch.gt(scores, target_score[:, None], out=compared).sum(dim=1).long()
    tied = torch.ge(scores, target_score[:, None], out=compared).sum(dim=1).long() > higher
    rows = tied.nonzero()[:, 0]
    ties = (scores[rows] == target_score[rows, None]) & (order < target_order[rows, None])
    return higher.index_add(0, rows, ties.sum(dim=1))
