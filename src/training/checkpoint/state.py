"""What a checkpoint holds, by name: independent of how the model is wrapped, sharded or frozen.

Tensors are keyed `model.NAME`, `optimizer.NAME.MOMENT`, `ema.NAME` and `rng.RANK.KIND`, where NAME is the
parameter's name on the bare model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from shardclip.errors import UserError
from shardclip.training.checkpoint.moments import (
    moment_like,
    moments_to_plain,
    moments_to_tensors,
    parameter_names,
    saved_moments,
    some,
    take_moments,
)
from shardclip.training.checkpoint.rng import rng_state, set_rng_state

_log = logging.getLogger(__name__)


class HasState(Protocol):
    """Anything with a state of tensors and plain values, such as a GradScaler."""

    def state_dict(self) -> dict[str, Any]:
        """The state; tensors in it are the live ones."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state that `state_dict` returned."""


@dataclass
class TrainState:
    """Everything that the next step depends on."""

    model: nn.Module
    """The bare model, or wrapped by DDP, `fully_shard`, recompute or compile."""
    optimizer: torch.optim.Optimizer
    """Its per-parameter state must be tensors (AdamW's is)."""
    ema: HasState | None = None
    """Moving average of the weights, keyed by the same names."""
    scaler: HasState | None = None
    """Loss scaler of fp16 training."""
    progress: dict[str, Any] = field(default_factory=dict)
    """Plain values (what JSON holds): samples seen, loader position over all ranks, configuration."""
    dormant: dict[str, Tensor] = field(default_factory=dict)
    """Moments of parameters that are frozen in this run, kept for one that trains them again."""


def to_tensors(state: TrainState, rank: int) -> dict[str, Tensor]:
    """All tensors of the state, live, keyed by name. Collective under FSDP: it reshards what is gathered."""
    # The model first: a forward without backward leaves FSDP's root gathered, and its parameters are then not
    # those that the optimizer knows. Taking the state dict reshards it.
    tensors = model_tensors(state)
    moments = state.dormant | moments_to_tensors(state.model, state.optimizer)
    tensors |= {f"optimizer.{name}": value for name, value in moments.items()}
    if state.ema is not None:
        tensors |= {f"ema.{name}": value for name, value in _tensors_of(state.ema.state_dict()).items()}
    tensors |= {f"rng.{rank}.{kind}": value for kind, value in rng_state().items()}
    return tensors


def model_tensors(state: TrainState) -> dict[str, Tensor]:
    """The model's live tensors, as `model.NAME`."""
    values = get_model_state_dict(state.model).items()
    return {f"model.{name}": value for name, value in values if isinstance(value, Tensor)}


def to_plain(state: TrainState) -> dict[str, Any]:
    """All that is not a tensor.

    Raises:
        TypeError: a value that JSON does not give back as it was; the message has its place.
    """
    plain = {
        "progress": state.progress,
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "ema": None if state.ema is None else _plain_of(state.ema.state_dict()),
        "optimizer": moments_to_plain(state.model, state.optimizer),
    }
    _require_plain(plain, "state")
    return plain


def load_targets(
    state: TrainState, saved: Mapping[str, TensorStorageMetadata], rank: int
) -> dict[str, Tensor]:
    """The tensors that loading fills, by the checkpoint's keys. Moments are made as the checkpoint has them.

    Raises:
        UserError: the model is not the one that was saved.
    """
    targets = model_tensors(state)
    shapes = {key: tuple(kind.size) for key, kind in saved.items() if key.startswith("model.")}
    check_same_model(targets, shapes)
    moments = saved_moments(saved)
    for name, parameter in parameter_names(state.model).items():
        for moment in moments.get(name, ()):
            stored = saved[key := f"optimizer.{name}.{moment}"]
            dtype = stored.properties.dtype
            targets[key] = moment_like(state.optimizer, parameter, moment, stored.size, dtype)
    if state.ema is not None:
        average = {f"ema.{name}": value for name, value in _tensors_of(state.ema.state_dict()).items()}
        targets |= {key: value for key, value in average.items() if key in saved}
    for kind, value in rng_state().items():
        if (key := f"rng.{rank}.{kind}") in saved:
            targets[key] = torch.empty(saved[key].size, dtype=value.dtype)
    return targets


def take_targets(
    state: TrainState, filled: Mapping[str, Tensor], plain: Mapping[str, Any], rank: int
) -> None:
    """Give the filled tensors and the plain values to the parts of the state."""
    state.dormant = take_moments(state.model, state.optimizer, filled, plain["optimizer"])
    start_average(state, filled)
    if state.ema is not None and plain["ema"] is not None:
        state.ema.load_state_dict(state.ema.state_dict() | plain["ema"])
    if state.scaler is not None and plain["scaler"] is not None:
        state.scaler.load_state_dict(plain["scaler"])
    state.progress.clear()
    state.progress.update(plain["progress"])
    own = {key.split(".")[2]: value for key, value in filled.items() if key.startswith(f"rng.{rank}.")}
    if own:
        set_rng_state(own)
    else:
        _log.info("the checkpoint has no random state of rank %d, which goes on with its own", rank)


def start_average(state: TrainState, filled: Mapping[str, Tensor]) -> None:
    """Where the moving average has nothing of its own among the filled tensors, take the weights'."""
    if state.ema is None:
        return
    average = _tensors_of(state.ema.state_dict())
    missing = [name for name in average if f"ema.{name}" not in filled and f"model.{name}" in filled]
    for name in missing:
        with torch.no_grad():
            average[name].copy_(filled[f"model.{name}"])
    if missing:
        _log.info("the moving average of %d tensors starts from their loaded weights", len(missing))


def check_same_model(model: Mapping[str, Tensor], saved: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a `UserError` of a few lines where the model's tensors are not those saved (key to shape)."""
    resized = [
        f"{key} is {saved[key]} there and {tuple(value.shape)} here"
        for key, value in model.items()
        if key in saved and saved[key] != tuple(value.shape)
    ]
    differences = {
        "only in this model": sorted(model.keys() - saved.keys()),
        "only in the checkpoint": sorted(saved.keys() - model.keys()),
        "resized": resized,
    }
    lines = [
        f"  {len(found)} tensors {what}: {some([key.removeprefix('model.') for key in found])}"
        for what, found in differences.items()
        if found
    ]
    if lines:
        advice = "Start with the --model, --model-config and --force-* flags of the run that it comes from."
        raise UserError("\n".join(["the checkpoint is of another model:", *lines, advice]))


def _tensors_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _plain_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def _require_plain(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place}: key {key!r} is not a string")
            _require_plain(item, f"{place}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _require_plain(item, f"{place}[{number}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(
            f"{place} is a {type(value).__name__}; a checkpoint holds tensors and plain values only"
        )
