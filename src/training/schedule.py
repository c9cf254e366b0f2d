"""The learning rate as a function of the samples seen: the same curve whatever the batch or the ranks."""

import math
from dataclasses import dataclass

import torch

from shardclip.errors import UserError
from shardclip.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then cosine, constant, or constant with a cooldown; all lengths are in samples.

    At a fixed global batch it takes open_clip's value at every step; past the end it holds the last one.
    """

    peak: float
    """Learning rate after the warm-up."""
    total: int
    """Samples of the whole run."""
    global_batch: int
    """Samples of one step now."""
    warmup: int = 0
    """Samples over which the rate rises linearly from 0 to `peak`."""
    kind: str = "cosine"
    """cosine, const or const-cooldown."""
    cooldown: int = 0
    """Samples at the end over which const-cooldown goes down."""
    cooldown_end: float = 0.0
    """Learning rate at the end of the cooldown."""
    cooldown_power: float = 1.0
    """Exponent of the cooldown; 1 is linear."""

    def lr(self, samples_seen: int) -> float:
        """Learning rate of the step that starts after `samples_seen` samples.

        Cosine: SGDR, https://arxiv.org/abs/1608.03983, equation 5, without restarts. In the warm-up the
        step's own samples count, so that the first step moves.
        """
        if samples_seen < self.warmup:
            return self.peak * min(1.0, (samples_seen + self.global_batch) / self.warmup)
        if self.kind == "cosine":
            progress = _progress(samples_seen, self.warmup, self.total)
            return 0.5 * (1 + math.cos(math.pi * progress)) * self.peak
        if self.kind == "const-cooldown":
            left = 1 - _progress(samples_seen, self.total - self.cooldown, self.total)
            return left**self.cooldown_power * (self.peak - self.cooldown_end) + self.cooldown_end
        return self.peak

    def apply(self, optimizer: torch.optim.Optimizer, samples_seen: int) -> float:
        """Set every group's `lr` to `lr(samples_seen)` times the group's `lr_scale`; return the former."""
        lr = self.lr(samples_seen)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        return lr


def _progress(samples_seen: int, start: int, end: int) -> float:
    """How much of [start, end] is behind, in [0, 1]."""
    if samples_seen >= end:
        return 1.0
    return max(0.0, (samples_seen - start) / (end - start))


def build_schedule(
    config: OptimizerConfig,
    *,
    total_samples: int,
    epoch_samples: int,
    global_batch: int,
    first_global_batch: int | None = None,
) -> Schedule:
    """The schedule of a run of `total_samples`, in epochs of `epoch_samples`, `global_batch` a step.

    Args:
        first_global_batch: the global batch of the run's first start, which turns `--warmup` from steps into
            samples; a resumed run takes it from its checkpoint. Default: `global_batch`.

    Raises:
        UserError: the warm-up, or the warm-up and the cooldown, are longer than the run.
    """
    if config.skip_scheduler:
        return Schedule(config.lr, total_samples, global_batch, kind="const")
    warmup = config.warmup * (first_global_batch or global_batch)
    if warmup > total_samples:
        raise UserError(
            f"--warmup {config.warmup} steps are {warmup} samples, but the whole run is {total_samples}: "
            "the learning rate would never reach --lr. Lower --warmup"
        )
    cooldown = 0
    if config.lr_scheduler == "const-cooldown":
        if config.epochs_cooldown is None:
            raise UserError("--lr-scheduler const-cooldown needs --epochs-cooldown")
        cooldown = round(config.epochs_cooldown * epoch_samples)
        if warmup + cooldown > total_samples:
            raise UserError(
                f"warm-up ({warmup} samples) and cooldown ({cooldown}) exceed the run ({total_samples}): "
                "lower --warmup or --epochs-cooldown"
            )
    return Schedule(
        peak=config.lr,
        total=total_samples,
        global_batch=global_batch,
        warmup=warmup,
        kind=config.lr_scheduler,
        cooldown=cooldown,
        cooldown_end=config.lr_cooldown_end,
        cooldown_power=config.lr_cooldown_power,
    )
