"""Exponential moving average of the weights, sharded as they are: each rank averages its own shards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardclip.errors import UserError
from shardclip.training.optimizer import clean_name


@dataclass(frozen=True)
class EmaConfig:
    """Moving average of the weights."""

    ema_decay: float | None = None
    """Keep a moving average of the weights that keeps this share of itself at each step, such as 0.9999."""
    ema_warmup: bool = True
    """Let that share rise with the steps n as (1 + n) / (10 + n), so that early weights fade."""

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise UserError(f"--ema-decay {self.ema_decay}: must be between 0 and 1")


class Ema:
    """The average of a model's trainable parameters in fp32, under any engine (Polyak and Juditsky 1992).

    What does not train (frozen parameters, buffers) has no average: it is the model's. The average starts as
    the weights are when it is made, which is after the model is wrapped and filled.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = True) -> None:
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reshard()
        trainable = {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        self._averages = {name: p.detach().float().clone() for name, p in trainable.items()}
        # Under FSDP these are the shards, which stay the same objects while a unit is gathered and freed.
        self._weights = list(trainable.values())

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights: after each optimizer step that was taken."""
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        weights = [_local(weight) for weight in self._weights]
        torch._foreach_lerp_([_local(a) for a in self._averages.values()], weights, 1 - decay)
        self.updates += 1

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Evaluate inside with the average as the model's weights; do not save or train there."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Any]:
        """The averages, live, by the parameters' names on the bare model; and the number of updates."""
        return {**self._averages, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave; its tensors may be those of this average, filled in place."""
        for name, average in self._averages.items():
            if state[name] is not average:
                average.copy_(state[name])
        self.updates = state["updates"]

    @torch.no_grad()
    def _exchange(self) -> None:
        # A unit that is still gathered would go on with the weights of before.
        self._reshard()
        for average, weight in zip(self._averages.values(), self._weights, strict=True):
            held = _local(weight).clone()
            _local(weight).copy_(_local(average))
            _local(average).copy_(held)

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
