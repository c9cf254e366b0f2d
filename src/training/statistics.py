"""BatchNorm's running statistics in a step that may run a forward twice, or on a blank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from shardclip.training.optimizer import clean_name

BatchNorm = nn.modules.batchnorm._BatchNorm


def batch_norms(model: nn.Module) -> dict[str, BatchNorm]:
    """The BatchNorm layers of a plain or wrapped model, of any dimension, by their plain names."""
    return {clean_name(n): layer for n, layer in model.named_modules() if isinstance(layer, BatchNorm)}


@contextmanager
def statistics_kept(norms: Sequence[BatchNorm], *, blank: bool = False) -> Iterator[None]:
    """Forward passes inside leave the running statistics alone.

    Args:
        norms: the layers.
        blank: the batch stands in for one that is missing: it is normalised by the running statistics, since
            a single row has none of its own.
    """
    before = [(norm, norm.momentum, norm.num_batches_tracked, norm.training) for norm in norms]
    for norm, _, tracked, training in before:
        norm.momentum = 0.0
        norm.training = training and not blank
        if tracked is not None:
            norm.num_batches_tracked = tracked.clone()
    try:
        yield
    finally:
        for norm, momentum, tracked, training in before:
            norm.momentum, norm.num_batches_tracked, norm.training = momentum, tracked, training
