"""From a run's checkpoint to a file for others."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import yaml
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardclip.errors import UserError
from shardclip.models.export import Format, UnreadTensor, write_model
from shardclip.models.factory import ModelSpec
from shardclip.training.checkpoint.folders import published
from shardclip.training.checkpoint.storage import AnyPath, SafeReader, any_path, fault, fill

SPEC_NAME = "model.json"
_log = logging.getLogger(__name__)


def find(path: AnyPath) -> AnyPath:
    """The checkpoint meant by a path: itself, or the newest whole one of a run's folder.

    Raises:
        UserError: there is none.
    """
    if (path / ".metadata").is_file():
        return path
    checkpoints = published(path / "checkpoints") or published(path)
    if not checkpoints and (elsewhere := _place_elsewhere(path / "config.yaml")) is not None:
        checkpoints = published(elsewhere)
    for checkpoint in reversed(checkpoints):
        if (found := fault(checkpoint)) is None:
            return checkpoint
        _log.warning("%s is damaged (%s): falling back to the one before it", checkpoint, found)
    raise UserError(f"{path}: neither a checkpoint nor a run with one")


def _place_elsewhere(config: AnyPath) -> AnyPath | None:
    """Where a run keeps its checkpoints by --checkpoint-dir."""
    if not config.is_file():
        return None
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    place = settings.get("remote", {}).get("checkpoint_dir")
    return None if place is None else any_path(place)


def read_spec(checkpoint: AnyPath) -> ModelSpec:
    """The architecture of the run that a checkpoint belongs to.

    Raises:
        UserError: the run's folder does not say.
    """
    beside = checkpoint.parent / SPEC_NAME
    path = beside if beside.is_file() else checkpoint.parent.parent / SPEC_NAME
    try:
        return ModelSpec.load(path)  # type: ignore[arg-type]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: the model's configuration is not there ({error})") from None


def unread_weights(checkpoint: AnyPath, *, ema: bool = False) -> dict[str, UnreadTensor]:
    """The model's tensors in a checkpoint, by our names, unread.

    Args:
        checkpoint: its folder.
        ema: take the moving average, and the weights themselves where it has none (buffers).

    Raises:
        UserError: it is not whole, holds something that is not a tensor, or no moving average.
    """
    reader = SafeReader(checkpoint)
    saved = reader.tensors()
    keys = {key.removeprefix("model."): key for key in saved if key.startswith("model.")}
    average = {key.removeprefix("ema."): key for key in saved if key.startswith("ema.")}
    if ema and not average:
        raise UserError(f"{checkpoint}: has no moving average of the weights; leave out --ema")
    if ema:
        keys |= {name: key for name, key in average.items() if name in keys}
    return {name: _unread(reader, key, saved[key]) for name, key in keys.items()}


def export(
    checkpoint: AnyPath,
    out: Path,
    *,
    format: Format = "safetensors",
    dtype: torch.dtype | None = None,
    ema: bool = False,
) -> list[Path]:
    """Write the weights of a checkpoint as open_clip reads them. Runs in one process.

    Args:
        checkpoint: a checkpoint, or the folder of a run (its newest whole one is taken).
        out: the file (`safetensors`, `pt`) or folder (`hf`) to write.
        format: what to write; see `shardclip.models.export.write_model`.
        dtype: dtype of the weights in the file; None leaves them as they are.
        ema: the moving average instead of the weights.

    Returns:
        The files written.

    Raises:
        UserError: there is no such checkpoint, or it cannot be read.
    """
    checkpoint = find(checkpoint)
    weights = unread_weights(checkpoint, ema=ema)
    return write_model(weights, read_spec(checkpoint), out, format=format, dtype=dtype)


def _unread(reader: SafeReader, key: str, saved: TensorStorageMetadata) -> UnreadTensor:
    def read() -> Tensor:
        target = {key: torch.empty(saved.size, dtype=saved.properties.dtype)}
        fill(target, reader)
        return target[key]

    return UnreadTensor(tuple(saved.size), saved.properties.dtype, read)
