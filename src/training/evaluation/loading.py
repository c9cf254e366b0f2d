"""From what a user calls a model (a run, a checkpoint, a file, a name) to the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.factory import ModelConfig, ModelSpec
from shardclip.models.pretrained import CONFIG_NAME, WEIGHT_SUFFIXES, weights_in
from shardclip.training.checkpoint.export import find, read_spec, unread_weights
from shardclip.training.checkpoint.storage import AnyPath, any_path


@dataclass(frozen=True)
class Saved:
    """A model that is found but not read."""

    spec: ModelSpec
    checkpoint: AnyPath | None
    """Folder of a checkpoint of ours; None if `config` says where the weights are."""
    config: ModelConfig
    origin: str
    """Where the weights come from, for people and results."""


def locate(source: str, config: ModelConfig) -> Saved:
    """What `source` means.

    Args:
        source: a run's folder, a checkpoint in it, an exported folder or file, `hf-hub:NAME`, or a name of
            open_clip's list.
        config: the model flags: the architecture of a file that has no configuration beside it, and the
            weights of a name.

    Raises:
        UserError: there is no such model, or its weights or its architecture are not known.
    """
    if "://" in source:
        remote = find(any_path(source))
        return Saved(read_spec(remote), remote, config, source)
    path = Path(source.removeprefix("local-dir:"))
    if path.is_dir() and not (path / CONFIG_NAME).is_file():
        checkpoint = find(path)
        return Saved(read_spec(checkpoint), checkpoint, config, str(checkpoint))
    if path.is_dir():
        weights = weights_in(path)
        if weights is None:
            raise UserError(f"{source}: there is no file of weights beside {CONFIG_NAME}")
        config = replace(config, model=f"local-dir:{path}", pretrained=str(weights))
    elif path.is_file():
        config = replace(config, pretrained=str(path))
        if config.model_config is None and (path.parent / CONFIG_NAME).is_file():
            config = replace(config, model=f"local-dir:{path.parent}")
    elif path.suffix in WEIGHT_SUFFIXES:
        raise UserError(f"{source}: no such file")
    else:
        config = replace(config, model=source)
        if config.pretrained is None and config.hub is None:
            raise UserError(
                f"{source}: no such run or file, so it is taken for the name of an architecture, and that "
                "needs --pretrained (a tag of open_clip's list or a file of weights)"
            )
    return Saved(factory.resolve(config), None, config, config.pretrained or source)


def load(saved: Saved, *, ema: bool = False) -> DualEncoder:
    """The plain model on the CPU in fp32, with its weights.

    Args:
        saved: what `locate` found.
        ema: the moving average instead of the weights; only a checkpoint of ours has it.

    Raises:
        UserError: the weights cannot be read or do not fit.
    """
    if saved.checkpoint is None:
        if ema:
            raise UserError(f"--ema: {saved.origin} holds one set of weights; leave it out")
        return factory.build(saved.spec, saved.config)
    model = factory.build(saved.spec)
    unread = unread_weights(saved.checkpoint, ema=ema)
    model.load_state_dict({name: tensor.read() for name, tensor in unread.items()})
    return model
