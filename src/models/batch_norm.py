"""BatchNorm whose statistics may be those of all ranks, and are fp32 whatever the tower computes in.

Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167. torch's `SyncBatchNorm` wants a GPU, and under
FSDP's mixed precision torch's BatchNorm meets bf16 weights with fp32 statistics, which it refuses on CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Takes the place of `nn.BatchNorm1d/2d/3d` by `convert_batch_norm`; same parameters and buffers."""

    synchronised: bool
    """Whether the statistics of training are those of all ranks' batches."""
    blank: bool
    """Whether the next batches stand in for missing ones: normalised like others, and not counted."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Any [N, C, ...] is taken."""

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, ...] in any precision -> the same shape and precision."""
        x = input.float()
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        if self.training:
            x = self._normalised_by_batch(x)
            shape = [1, -1] + [1] * (x.ndim - 2)
            if weight is not None and bias is not None:
                x = x * weight.view(shape) + bias.view(shape)
        else:
            x = F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.eps)
        return x.to(input.dtype)

    def _normalised_by_batch(self, x: Tensor) -> Tensor:
        dimensions = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        # Sums of squares cancel less around a value near the mean; all ranks share this one.
        around = self.running_mean if self.running_mean is not None else x.new_zeros(x.shape[1])
        shifted = x - around.view(shape)
        counted = 0.0 if self.blank else 1.0
        count = x.new_full((1,), counted * x.numel() / x.shape[1])
        sums = torch.cat(
            [counted * shifted.sum(dimensions), counted * shifted.square().sum(dimensions), count]
        )
        if self.synchronised and dist.is_initialized() and dist.get_world_size() > 1:
            sums = _SumOverRanks.apply(sums)
        total = sums[-1].clamp(min=1.0)
        mean, square = sums[:-1].view(2, -1) / total
        variance = (square - mean.square()).clamp(min=0.0)
        self._update(mean.detach() + around, variance.detach(), sums[-1].detach())
        return (shifted - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        counts = (count > 0).to(mean.dtype)
        self.num_batches_tracked += counts.long()
        momentum = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        unbiased = variance * count / (count - 1).clamp(min=1.0)
        self.running_mean.lerp_(mean, counts * momentum)
        self.running_var.lerp_(unbiased, counts * momentum)


class BatchNormAct(BatchNorm):
    """timm's BatchNorm with dropout and activation behind it."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, ...] -> the same."""
        return self.act(self.drop(super().forward(input)))


class _SumOverRanks(torch.autograd.Function):
    """A sum over all ranks that gradients go back through: each rank's part is in every rank's result."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


def convert_batch_norm(model: nn.Module, *, synchronised: bool) -> int:
    """Make every BatchNorm of a plain model a `BatchNorm`, in place and under its name; how many there are.

    Args:
        model: before it is locked, wrapped or compiled.
        synchronised: take the statistics over all ranks.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        # The class is exchanged rather than the module: its tensors keep their names and their places.
        norm.__class__ = BatchNormAct if hasattr(norm, "act") else BatchNorm
        norm.synchronised = synchronised  # type: ignore[assignment]
        norm.blank = False  # type: ignore[assignment]
    return len(norms)
