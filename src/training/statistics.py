"""BatchNorm's running statistics in a step that may run a forward twice, or on a blank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from shardclip.models.batch_norm import BatchNorm
from shardclip.training.optimizer import clean_name

AnyBatchNorm = nn.modules.batchnorm._BatchNorm


def batch_norms(model: nn.Module) -> dict[str, AnyBatchNorm]:
    """The BatchNorm layers of a plain or wrapped model, of any dimension, by their plain names."""
    return {clean_name(n): layer for n, layer in model.named_modules() if isinstance(layer, AnyBatchNorm)}


@contextmanager
def statistics_kept(norms: Sequence[AnyBatchNorm], *, blank: bool = False) -> Iterator[None]:
    """Forward passes inside leave the running statistics alone.

    Args:
        norms: the layers.
        blank: the batch stands in for one that is missing. It counts for nothing: a synchronised layer takes
            the other ranks' statistics, another its running ones, since a single row has none of its own.
    """
    before = [(norm, norm.momentum, norm.num_batches_tracked, norm.training) for norm in norms]
    for norm, _, tracked, training in before:
        synchronised = isinstance(norm, BatchNorm) and norm.synchronised
        if isinstance(norm, BatchNorm):
            norm.blank = blank
        norm.training = training and (synchronised or not blank)
        if not (synchronised and blank):
            norm.momentum = 0.0
            norm.num_batches_tracked = None if tracked is None else tracked.clone()
    try:
        yield
    finally:
        for norm, momentum, tracked, training in before:
            norm.momentum, norm.num_batches_tracked, norm.training = momentum, tracked, training
            if isinstance(norm, BatchNorm):
                norm.blank = False


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Make running statistics that each rank keeps of its own batches the mean of all ranks'; collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for norm in batch_norms(model).values():
        for statistic in (norm.running_mean, norm.running_var):
            if statistic is not None:
                dist.all_reduce(statistic)
                statistic /= dist.get_world_size()
