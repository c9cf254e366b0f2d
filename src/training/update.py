"""The end of a step: gradients unscaled and clipped, weights moved; nothing where the gradient is not finite.

torch's fused Adam can be told so on the device, as `torch.amp.GradScaler` does it: the host goes on to the
next step without waiting for the norm. For any other optimizer it has to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from shardclip.training.optimizer import scale_gradients


def overshoot(norm: Tensor, max_norm: float) -> Tensor:
    """[]: how many times the gradient's `norm` ([]) is larger than allowed, and 1 if it is not."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


class Update:
    """An optimizer whose step a gradient that is not finite holds back."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """`device`: where the norm of the gradient is known."""
        self.optimizer = optimizer
        self.device = device

    def __call__(self, parameters: Sequence[nn.Parameter], finite: Tensor, divisor: Tensor | None) -> None:
        """Divide the gradients by `divisor` and make the optimizer's step, if `finite` is true.

        Args:
            parameters: those that the optimizer updates.
            finite: [] bool, the same on every rank.
            divisor: [] fp32, the same on every rank; None for 1.
        """
        if self.is_told_on_device:
            self._tell(finite, divisor)
        elif bool(finite):
            if divisor is not None:
                scale_gradients(parameters, 1 / divisor)
            self.optimizer.step()

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
