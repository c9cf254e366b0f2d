"""The optimizer's state by the names of parameters, so that freezing and unfreezing lose nothing.

A parameter that never had a gradient has no moments, in the optimizer as in the file: nothing is made up for
it, so its bias correction starts at its own first step. Parameter groups are not stored: which parameter
decays, and by how much, is decided by the configuration, and the learning rate by the samples seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardclip.training.optimizer import clean_name

_log = logging.getLogger(__name__)


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their name on the bare model, whatever wraps it."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


def moments_to_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Live state of the optimizer, as `NAME.MOMENT`."""
    return {
        f"{name}.{moment}": value
        for name, parameter in parameter_names(model).items()
        for moment, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def moments_to_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What some optimizers keep as plain numbers: per parameter, or as a `step` in each group."""
    named = {
        name: {m: v for m, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, Tensor)}
        for name, parameter in parameter_names(model).items()
    }
    steps = [group["step"] for group in optimizer.param_groups if "step" in group]
    return {
        "parameters": {name: plain for name, plain in named.items() if plain},
        "step": max(steps, default=None),
    }


def saved_moments(keys: Iterable[str]) -> dict[str, list[str]]:
    """`{parameter name: [moment names]}` of the keys `optimizer.NAME.MOMENT`; others are left out."""
    moments: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith("optimizer."):
            name, _, moment = key.removeprefix("optimizer.").rpartition(".")
            moments.setdefault(name, []).append(moment)
    return moments


def moment_like(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    moment: str,
    size: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Zeros for a saved moment: sharded as the parameter where it has its shape, and where the step looks."""
    fused = any(
        group.get("fused") or group.get("capturable")
        for group in optimizer.param_groups
        if any(parameter is other for other in group["params"])
    )
    if moment == "step" and not fused:
        # Adam counts on the CPU, unless its kernel runs as one launch on the device.
        return torch.zeros(size, dtype=dtype)
    if torch.Size(size) == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(size, dtype=dtype, device=parameter.device)


def take_moments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Give loaded moments (`optimizer.NAME.MOMENT`) to the optimizer, in place of what it has.

    Returns:
        Those of parameters that it does not train, as `NAME.MOMENT`.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    moments = saved_moments(tensors)
    optimizer.state.clear()
    dormant: dict[str, Tensor] = {}
    fresh = []
    for name, parameter in parameter_names(model).items():
        values: dict[str, Any] = {m: tensors[f"optimizer.{name}.{m}"] for m in moments.get(name, ())}
        if id(parameter) not in trained:
            dormant |= {f"{name}.{moment}": value for moment, value in values.items()}
        elif values:
            optimizer.state[parameter] = values | plain["parameters"].get(name, {})
        else:
            fresh.append(name)
    if plain["step"] is not None:
        for group in optimizer.param_groups:
            group["step"] = plain["step"]
    if dormant:
        _log.info("%d moments of frozen parameters are kept for later", len(dormant))
    if fresh and moments:
        _log.info("%d parameters start with new moments: %s", len(fresh), some(fresh))
    return dormant


def some(names: list[str], shown: int = 3) -> str:
    """The first few of a list, for a message."""
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")
