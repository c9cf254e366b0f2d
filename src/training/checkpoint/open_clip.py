"""Starting from a training checkpoint of open_clip: its weights and, where it names them, its moments.

Its file holds `epoch`, `name`, `state_dict`, `optimizer`; the data position is not in it. Version 3.3.0 keys
the optimizer's state by the number of a parameter, whose order follows from `open_clip_train.main`: first all
that do not decay, then the rest, each in the model's order. The development version has names under FSDP.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from shardclip.models.weights import from_open_clip, read_file
from shardclip.training.checkpoint.moments import moment_like, parameter_names
from shardclip.training.checkpoint.state import TrainState, check_same_model, model_tensors, start_average

_log = logging.getLogger(__name__)
_NAME = re.compile(r"epoch_(\d+|latest)\.pt")


def newest_of_open_clip(folder: Path) -> Path | None:
    """The file in a folder that open_clip's own trainer takes for the newest; None where it left none.

    That is `epoch_latest.pt` (its --save-most-recent), then the highest number.
    """
    epochs = [(match[1], path) for path in folder.glob("epoch_*.pt") if (match := _NAME.fullmatch(path.name))]
    order = {path: float("inf") if epoch == "latest" else int(epoch) for epoch, path in epochs}
    return max(order, key=order.__getitem__, default=None)


def load_open_clip(path: Path, state: TrainState) -> None:
    """Fill weights and moments from a file of open_clip, or weights alone from a bare one.

    `state.progress` stays: the run starts anew, from these weights. What cannot be carried over is logged.

    Raises:
        UserError: it cannot be read safely, or is of another model.
    """
    content = read_file(path)
    weights = from_open_clip(content)
    targets = model_tensors(state)
    check_same_model(targets, {f"model.{name}": tuple(value.shape) for name, value in weights.items()})
    for name, value in weights.items():
        _copy(value, targets[f"model.{name}"])
    start_average(state, targets)
    moments = _moments(content, weights)
    if moments is None:
        _log.warning("%s: weights taken; it has no moments that can be told apart, they start anew", path)
    else:
        taken = _take(state, moments)
        _log.info("%s: weights taken, and the moments of %d parameters", path, taken)
    for name in ("epoch", "samples_seen"):
        if name in content:
            _log.info("%s: it had seen %s %s; this run counts from 0", path, content[name], name)


def _moments(content: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]] | None:
    """`{our parameter name: {moment: value}}`, or None where the file does not say which is whose."""
    optimizer = content.get("optimizer") or {}
    state = optimizer.get("state", {})
    if not state:
        return None
    # Our names are in the order of the file's, so that each can be found for the other.
    ours = dict(zip(_parameters(content["state_dict"]), weights, strict=True))
    theirs = {name: name for name in ours}
    if not all(isinstance(key, str) for key in state):
        theirs = _numbered(content["state_dict"], optimizer["param_groups"])  # type: ignore[assignment]
    if not state.keys() <= theirs.keys():
        return None
    named = {ours[theirs[key]]: moments for key, moments in state.items()}
    fits = all(_shapes_fit(moments, weights[name]) for name, moments in named.items())
    return named if fits else None


def _parameters(state_dict: Mapping[str, Tensor]) -> list[str]:
    return [name for name in state_dict if not name.endswith("text.transformer.embeddings.position_ids")]


def _numbered(state_dict: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> dict[int, str]:
    """Number to name as in 3.3.0, whose rule is this; empty where the groups are not of its making."""
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    names = [name for name in _parameters(state_dict) if not name.endswith(buffers)]
    no_decay = [
        name
        for name in names
        if state_dict[name].ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
    ]
    rest = [name for name in names if name not in set(no_decay)]
    if [len(group["params"]) for group in groups] != [len(no_decay), len(rest)]:
        return {}
    numbers = [number for group in groups for number in group["params"]]
    return dict(zip(numbers, no_decay + rest, strict=True))


def _shapes_fit(moments: Mapping[str, Any], weight: Tensor) -> bool:
    """Scale and bias may be of shape [1] there."""
    return all(
        torch.as_tensor(value).numel() == weight.numel() for name, value in moments.items() if name != "step"
    )


def _take(state: TrainState, moments: Mapping[str, Mapping[str, Any]]) -> int:
    taken = 0
    for name, parameter in parameter_names(state.model).items():
        values = {}
        for moment, value in moments.get(name, {}).items():
            saved = torch.as_tensor(value, dtype=torch.float32)
            size = torch.Size() if moment == "step" else parameter.shape
            values[moment] = moment_like(state.optimizer, parameter, moment, size, saved.dtype)
            _copy(saved.reshape(size), values[moment])
        if values and parameter.requires_grad:
            state.optimizer.state[parameter] = values
            taken += 1
        else:
            state.dormant |= {f"{name}.{moment}": value for moment, value in values.items()}
    return taken


@torch.no_grad()
def _copy(whole: Tensor, target: Tensor) -> None:
    """Copy a whole tensor into a plain or a sharded one; every rank has the whole."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    value = whole.to(target.device, target.dtype)
    part = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(part.to_local())
