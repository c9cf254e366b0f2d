"""BatchNorm whose statistics may be those of all ranks, and are at least fp32 whatever the tower computes in.

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
        precision = torch.promote_types(input.dtype, torch.float32)
        x = input.to(precision)
        weight, bias = (None if p is None else p.to(precision) for p in (self.weight, self.bias))
        if not self.training:
            x = F.batch_norm(x, self.running_mean, self.running_var, weight, bias, eps=self.eps)
        else:
            around = x.new_zeros(x.shape[1]) if self.running_mean is None else self.running_mean
            x, mean, variance, count = _OverRanks.apply(
                x, weight, bias, around, self.eps, not self.blank, self._spans_ranks()
            )
            self._update(mean, variance, count)
        return x.to(input.dtype)

    def _spans_ranks(self) -> bool:
        return self.synchronised and dist.is_initialized() and dist.get_world_size() > 1

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


class _OverRanks(torch.autograd.Function):
    """Normalise by the statistics of all rows that count, on all ranks or on this one alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        around: Tensor,
        eps: float,
        counts: bool,
        spans_ranks: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
        # Sums of squares cancel less around a value near the mean; the ranks share this one.
        mean = mean - around
        own = torch.cat([mean, variance + mean.square(), mean.new_ones(1)])
        sums = own * (x.numel() / x.shape[1] if counts else 0.0)
        if spans_ranks:
            dist.all_reduce(sums)
        count = sums[-1]
        mean, square = sums[:-1].view(2, -1) / count.clamp(min=1.0)
        variance = (square - mean.square()).clamp(min=0.0)
        mean = mean + around
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps, ctx.counts, ctx.spans_ranks = eps, counts, spans_ranks
        ctx.mark_non_differentiable(mean, variance, count)
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        # The part at fixed statistics; its weight and bias gradients are the sums that the rest needs.
        # Some of CUDA's kernels ask for saved statistics and a weight also where they could do without.
        inverse = (variance + ctx.eps).rsqrt()
        scale = torch.ones_like(mean) if weight is None else weight
        direct, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, scale, mean, variance, mean, inverse, False, ctx.eps, [True, True, True]
        )
        sums = torch.cat([by_weight, by_bias])
        if ctx.spans_ranks:
            dist.all_reduce(sums)
        if ctx.counts:
            shape = [1, -1] + [1] * (x.ndim - 2)
            along, level = sums.view(2, -1) / count.clamp(min=1.0)
            factor = inverse * scale
            slope = -factor * inverse * along
            direct.addcmul_(x, slope.view(shape)).sub_((factor * level + slope * mean).view(shape))
        no_weight = weight is None
        return (
            direct,
            None if no_weight else by_weight,
            None if no_weight else by_bias,
            None,
            None,
            None,
            None,
        )


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
