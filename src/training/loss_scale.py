"""The factor that keeps fp16 gradients above underflow: one for all ranks."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """The factor that keeps fp16 gradients above underflow.

    One factor and one decision for all ranks: they follow from the global gradient norm. Both stay on the
    device, so that no step waits for the host to hear of the one before.
    """

    def __init__(self, device: torch.device, start: float, *, growth_interval: int = 2000) -> None:
        self.growth_interval = growth_interval
        self.value = torch.tensor(start, device=device)
        """[] fp32."""
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        """[] int64: steps since the last change."""

    def update(self, finite: Tensor) -> None:
        """Halve if not `finite` ([] bool): an overflow; double after `growth_interval` good steps."""
        good_steps = torch.where(finite, self.good_steps + 1, 0)
        grows = good_steps == self.growth_interval
        self.value = torch.where(finite, torch.where(grows, self.value * 2, self.value), self.value / 2)
        self.good_steps = torch.where(grows, 0, good_steps)

    def state_dict(self) -> dict[str, float]:
        """Plain values for a checkpoint; waits for the device."""
        return {"value": float(self.value), "good_steps": int(self.good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over what `state_dict` gave."""
        self.value.fill_(state["value"])
        self.good_steps.fill_(int(state["good_steps"]))
