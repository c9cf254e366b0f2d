"""One line of text for a step or an evaluation, in the form that open_clip's users grep for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Clock:
    """How far the run is, in samples."""

    seen: int
    total: int
    per_epoch: int

    @property
    def epoch(self) -> int:
        """The epoch that the last seen sample belongs to, counted from 0."""
        return max(self.seen - 1, 0) // self.per_epoch

    def remaining(self, samples_per_second: float) -> str:
        """Time to the end at this rate, as h:mm:ss."""
        if not (samples_per_second > 0 and math.isfinite(samples_per_second)):
            return "unknown"
        return str(timedelta(seconds=round((self.total - self.seen) / samples_per_second)))


def training_line(
    metrics: Mapping[str, float], averages: Mapping[str, float], clock: Clock, slowest: str | None = None
) -> str:
    """The numbers of one step; those that were not measured are left out.

    The first part, up to the losses, is open_clip 3.3's line; what it lacks follows.

    Args:
        metrics: see `Tracker.step` for the names and units.
        averages: moving averages of those metrics whose name ends in `loss`.
        clock: how far the run is.
        slowest: name of the slowest rank.
    """
    in_epoch = clock.seen - clock.epoch * clock.per_epoch
    percent = 100 * in_epoch / clock.per_epoch
    digits = len(str(clock.per_epoch))
    parts = [f"Train Epoch: {clock.epoch} [{in_epoch:>{digits}}/{clock.per_epoch} ({percent:.0f}%)]"]
    parts += _timing(metrics)
    if "lr" in metrics:
        parts.append(f"LR: {metrics['lr']:5f}")
    if "logit_scale" in metrics:
        parts.append(f"Logit Scale: {scale_text(metrics['logit_scale'], metrics.get('logit_scale_bound'))}")
    for name in loss_names(metrics):
        parts.append(f"{name.capitalize()}: {metrics[name]:#.5g} ({averages.get(name, metrics[name]):#.5g})")
    if "grad_norm" in metrics:
        parts.append(f"Grad Norm: {metrics['grad_norm']:.4g}")
    if "data_wait_share" in metrics:
        parts.append(f"Wait: {100 * metrics['data_wait_share']:.0f}%")
    if "mfu" in metrics:
        parts.append(f"MFU: {100 * metrics['mfu']:.1f}%")
    if "peak_memory_bytes" in metrics:
        parts.append(f"Memory: {metrics['peak_memory_bytes'] / 2**30:.2f} GiB")
    if "step_time_spread" in metrics and slowest is not None:
        parts.append(f"Slowest: {slowest} (+{100 * metrics['step_time_spread']:.0f}%)")
    if "samples_per_second" in metrics:
        parts.append(f"ETA: {clock.remaining(metrics['samples_per_second'])}")
    return " ".join(parts)


def evaluation_line(results: Mapping[str, float], clock: Clock) -> str:
    """open_clip's line of an evaluation."""
    pairs = "\t".join(
        f"{name}: {value:.4f}" for name, value in results.items() if isinstance(value, int | float)
    )
    return f"Eval Epoch: {math.ceil(clock.seen / clock.per_epoch)} {pairs}"


def loss_names(metrics: Mapping[str, float]) -> list[str]:
    """The losses among the metrics: the parts first, the total last."""
    return sorted(
        (name for name in metrics if name.endswith("loss")), key=lambda name: (name == "loss", name)
    )


def scale_text(scale: float, bound: float | None) -> str:
    """The factor that the logits are multiplied by, its logarithm, and whether it has reached its bound."""
    logarithm = f"{math.log(scale):.3f}" if scale > 0 else "undefined"
    at_bound = bound is not None and scale >= bound * (1 - 1e-4)
    return f"{scale:.3f} (ln {logarithm}{', at its bound' if at_bound else ''})"


def _timing(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    if "data_time" in metrics:
        parts.append(f"Data (t): {metrics['data_time']:.3f}")
    if "batch_time" in metrics:
        parts.append(f"Batch (t): {metrics['batch_time']:.3f},")
    if "samples_per_second" in metrics:
        parts.append(f"{metrics['samples_per_second']:#g}/s,")
    if "samples_per_second_per_gpu" in metrics:
        parts.append(f"{metrics['samples_per_second_per_gpu']:#g}/s/gpu")
    return parts
