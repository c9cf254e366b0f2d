"""What a checkpoint holds, by name: independent of how the model is wrapped, sharded or frozen.

Tensors are keyed `model.NAME`, `optimizer.NAME.MOMENT`, `ema.NAME` and `rng.RANK.KIND`, where NAME is the
parameter's name on the bare model. Parameter groups are not stored: which parameter decays, and by how much,
is decided by the configuration, and the learning rate by the samples seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from shardclip.errors import UserError
from shardclip.training.checkpoint.rng import rng_state, set_rng_state
from shardclip.training.optimizer import clean_name

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


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their name on the bare model, whatever wraps it."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


def to_tensors(state: TrainState, rank: int) -> dict[str, Tensor]:
    """All tensors of the state, live, keyed by name. Collective under FSDP: it reshards what is gathered."""
    # The model first: a forward without backward leaves FSDP's root gathered, and its parameters are then not
    # those that the optimizer knows. Taking the state dict reshards it.
    tensors = _model_tensors(state)
    tensors |= {f"optimizer.{name}": value for name, value in state.dormant.items()}
    for name, parameter in parameter_names(state.model).items():
        moments = _tensors_of(state.optimizer.state.get(parameter, {}))
        tensors |= {f"optimizer.{name}.{moment}": value for moment, value in moments.items()}
    if state.ema is not None:
        tensors |= {f"ema.{name}": value for name, value in _tensors_of(state.ema.state_dict()).items()}
    tensors |= {f"rng.{rank}.{kind}": value for kind, value in rng_state().items()}
    return tensors


def _model_tensors(state: TrainState) -> dict[str, Tensor]:
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
        "optimizer": _plain_moments(state),
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
    model = _model_tensors(state)
    check_same_model(model, saved)
    targets = dict(model)
    moments = _saved_moments(saved)
    fused = {
        id(parameter)
        for group in state.optimizer.param_groups
        for parameter in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    for name, parameter in parameter_names(state.model).items():
        for moment in moments.get(name, ()):
            key = f"optimizer.{name}.{moment}"
            # AdamW counts its steps on the CPU, unless its kernel runs as one launch on the device.
            on_cpu = moment == "step" and id(parameter) not in fused
            targets[key] = _like(parameter, saved[key], on_cpu)
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
    _take_moments(state, filled, plain["optimizer"])
    _take_average(state, filled, plain)
    if state.scaler is not None and plain["scaler"] is not None:
        state.scaler.load_state_dict(plain["scaler"])
    state.progress.clear()
    state.progress.update(plain["progress"])
    own = {key.split(".")[2]: value for key, value in filled.items() if key.startswith(f"rng.{rank}.")}
    if own:
        set_rng_state(own)
    else:
        _log.info("the checkpoint has no random state of rank %d, which goes on with its own", rank)


def _plain_moments(state: TrainState) -> dict[str, Any]:
    """What some optimizers keep as plain numbers: per parameter, or as a `step` in each group."""
    named = {
        name: _plain_of(state.optimizer.state.get(parameter, {}))
        for name, parameter in parameter_names(state.model).items()
    }
    steps = [group["step"] for group in state.optimizer.param_groups if "step" in group]
    return {
        "parameters": {name: plain for name, plain in named.items() if plain},
        "step": max(steps, default=None),
    }


def _take_moments(state: TrainState, filled: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    trained = {id(p) for group in state.optimizer.param_groups for p in group["params"] if p.requires_grad}
    moments = _saved_moments(filled)
    state.optimizer.state.clear()
    state.dormant.clear()
    fresh = []
    for name, parameter in parameter_names(state.model).items():
        values: dict[str, Any] = {m: filled[f"optimizer.{name}.{m}"] for m in moments.get(name, ())}
        if id(parameter) in trained:
            values |= plain["parameters"].get(name, {})
        if id(parameter) not in trained:
            state.dormant |= {f"{name}.{moment}": value for moment, value in values.items()}
        elif values:
            state.optimizer.state[parameter] = values
        else:
            fresh.append(name)
    if plain["step"] is not None:
        for group in state.optimizer.param_groups:
            group["step"] = plain["step"]
    if state.dormant:
        _log.info("%d moments of frozen parameters are kept for later", len(state.dormant))
    if fresh and moments:
        _log.info("%d parameters start with new moments: %s", len(fresh), _some(fresh))


def _take_average(state: TrainState, filled: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    if state.ema is None:
        return
    average = state.ema.state_dict()
    if plain["ema"] is None:
        _log.info("the checkpoint has no moving average: it starts from the loaded weights")
        with torch.no_grad():
            for name, value in _tensors_of(average).items():
                if f"model.{name}" in filled:
                    value.copy_(filled[f"model.{name}"])
    state.ema.load_state_dict(average | (plain["ema"] or {}))


def check_same_model(model: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Raise a `UserError` of a few lines where the model's and the checkpoint's tensors do not match."""
    theirs = {key: value for key, value in saved.items() if key.startswith("model.")}
    missing, foreign = sorted(model.keys() - theirs.keys()), sorted(theirs.keys() - model.keys())
    shapes = [
        f"{key} is {tuple(theirs[key].size)} there and {tuple(value.shape)} here"
        for key, value in model.items()
        if key in theirs and theirs[key].size != value.shape
    ]
    if not (missing or foreign or shapes):
        return
    lines = ["the checkpoint is of another model:"]
    for count, what in (
        (missing, "only in this model"),
        (foreign, "only in the checkpoint"),
        (shapes, "resized"),
    ):
        if count:
            lines.append(
                f"  {len(count)} tensors {what}: {_some([key.removeprefix('model.') for key in count])}"
            )
    lines.append(
        "Start it with the --model, --model-config and --force-* flags of the run that it comes from."
    )
    raise UserError("\n".join(lines))


def _saved_moments(keys: Iterable[str]) -> dict[str, list[str]]:
    """`{parameter name: [moment names]}` of the keys `optimizer.NAME.MOMENT`."""
    moments: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith("optimizer."):
            name, _, moment = key.removeprefix("optimizer.").rpartition(".")
            moments.setdefault(name, []).append(moment)
    return moments


def _like(parameter: nn.Parameter, saved: TensorStorageMetadata, on_cpu: bool) -> Tensor:
    """A tensor for a saved moment: sharded as the parameter where it has its shape."""
    dtype = saved.properties.dtype
    if saved.size == parameter.shape and not on_cpu:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(saved.size, dtype=dtype, device="cpu" if on_cpu else parameter.device)


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


def _some(names: list[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")
