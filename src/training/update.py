"""The end of a step: gradients unscaled and clipped, weights moved; nothing where the gradient is not finite.

torch's fused Adam can be told so on the device, as `torch.amp.GradScaler` does it: the host goes on to the
next step without waiting for the norm. For any other optimizer it has to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from shardclip.training.loss_scale import LossScale
from shardclip.training.optimizer import gradient_norm, scale_gradients


def overshoot(norm: Tensor, max_norm: float) -> Tensor:
    """[]: how many times the gradient's `norm` ([]) is larger than allowed, and 1 if it is not."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


@dataclass
class Update:
    """An optimizer whose step a gradient that is not finite holds back."""

    optimizer: torch.optim.Optimizer
    device: torch.device
    """Where the norm of the gradient is known."""
    max_norm: float | None = None
    """The gradient's norm is clipped to this."""
    loss_scale: LossScale | None = None
    """Of fp16 gradients; None for 1."""

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Move the weights by their gradients and let go of those; every rank calls it.

        Args:
            parameters: those that the optimizer updates.

        Returns:
            [] fp32, the same on every rank: the norm of the whole gradient, neither scaled nor clipped. The
            weights and the optimizer's state are as they were if it is not finite.
        """
        norm = gradient_norm(parameters).to(self.device, non_blocking=True)  # without gradients, a CPU's zero
        finite, divisor = norm.isfinite(), None
        if self.loss_scale is not None:
            divisor = self.loss_scale.value
            norm = norm / divisor
        if self.max_norm is not None:
            excess = overshoot(norm, self.max_norm)
            divisor = excess if divisor is None else divisor * excess
        if self.is_told_on_device:
            self._tell(finite, divisor)
        elif bool(finite):
            if divisor is not None:
                scale_gradients(parameters, 1 / divisor)
            self.optimizer.step()
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @cached_property
    def is_told_on_device(self) -> bool:
        """Whether the optimizer is a fused Adam with all of its parameters on the device of the norm.

        (Fused SGD can be told as well, but in its first step it would leave its momentum unset. The copy to
        parameters that are kept on the host would not be waited for.)
        """
        return isinstance(self.optimizer, torch.optim.Adam) and all(
            group["fused"] and all(p.device.type == self.device.type for p in group["params"])
            for group in self.optimizer.param_groups
        )

    def _tell(self, finite: Tensor, divisor: Tensor | None) -> None:
        self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf, self.optimizer.grad_scale  # type: ignore[attr-defined]
