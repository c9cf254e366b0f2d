"""The factor that keeps fp16 gradients above underflow: one for all ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The factor that keeps fp16 gradients above underflow; 1 and still for other precisions.

    One factor and one decision for all ranks: they follow from the global gradient norm.
    """

    value: float = 1.0
    dynamic: bool = False
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Halve after an overflow, double after `growth_interval` good steps."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Plain values for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over what `state_dict` gave."""
        self.value, self.good_steps = state["value"], int(state["good_steps"])
