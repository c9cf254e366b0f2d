"""Locking: which parameters train, by tower, by depth and by name, decided on the plain model.

A locked tower is that of locked-image tuning (LiT, https://arxiv.org/abs/2111.07991).
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from shardclip.errors import UserError
from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.layers import layer_groups, select


@dataclass(frozen=True)
class LockConfig:
    """What does not train."""

    lock_image: bool = False
    """Lock the image tower, its projection included."""
    lock_image_unlocked_groups: int = 0
    """Leave the last n layer groups of the locked image tower trainable: the projection, then the pooler
    where there is one, then blocks."""
    lock_image_freeze_bn_stats: bool = False
    """Keep the running statistics of BatchNorm in the locked part of the image tower as they are."""
    lock_text: bool = False
    """Lock the text tower, its projection included."""
    lock_text_unlocked_layers: int = 0
    """Leave the last n layer groups of the locked text tower trainable: the projection, then the pooler
    where there is one, then blocks."""
    lock_text_freeze_layer_norm: bool = True
    """Lock the norms of the locked text layers too; without, they train."""
    lock_patterns: tuple[str, ...] = ()
    """Also lock the parameters whose whole name a glob matches, such as 'visual.*.attn.*'."""

    def __post_init__(self) -> None:
        if not self.lock_image and (self.lock_image_unlocked_groups or self.lock_image_freeze_bn_stats):
            raise UserError("--lock-image-unlocked-groups and --lock-image-freeze-bn-stats need --lock-image")
        if not self.lock_text and (self.lock_text_unlocked_layers or not self.lock_text_freeze_layer_norm):
            raise UserError(
                "--lock-text-unlocked-layers and --no-lock-text-freeze-layer-norm need --lock-text"
            )


def lock(model: DualEncoder, config: LockConfig) -> None:
    """Set `requires_grad` to False for what `config` locks; call it on the plain model, before any wrapping.

    Nothing is ever unlocked: a tower's own frozen parameters (fixed sin-cos positions) stay frozen.

    Raises:
        UserError: more unlocked groups than the tower has, or a pattern that matches nothing.
    """
    locked: set[str] = set()
    if config.lock_image:
        flag = "--lock-image-unlocked-groups"
        image = _locked_names(model.visual, "visual", config.lock_image_unlocked_groups, flag)
        if config.lock_image_freeze_bn_stats:
            _freeze_statistics(model.visual, "visual", image)
        locked |= image
    if config.lock_text:
        text = _locked_names(
            model.text, "text", config.lock_text_unlocked_layers, "--lock-text-unlocked-layers"
        )
        if not config.lock_text_freeze_layer_norm:
            text -= _norm_names(model.text, "text")
        locked |= text
    names = [name for name, _ in model.named_parameters()]
    locked |= select(names, config.lock_patterns, "--lock-patterns")
    for name, parameter in model.named_parameters():
        if name in locked:
            parameter.requires_grad_(False)


def _locked_names(tower: nn.Module, prefix: str, unlocked_groups: int, flag: str) -> set[str]:
    """Full names of the tower's parameters, less those of its last `unlocked_groups` groups."""
    if unlocked_groups < 0:
        raise UserError(f"{flag} {unlocked_groups}: must be 0 or more")
    if unlocked_groups == 0:
        return {f"{prefix}.{name}" for name, _ in tower.named_parameters()}
    groups = layer_groups(tower)
    if unlocked_groups > len(groups):
        raise UserError(
            f"{flag} {unlocked_groups}: the tower ({type(tower).__name__}) has {len(groups)} layer groups"
        )
    return {f"{prefix}.{name}" for group in groups[:-unlocked_groups] for name in group}


def _norm_names(tower: nn.Module, prefix: str) -> set[str]:
    """Full names of the parameters of normalisation layers, RMSNorms of Hugging Face included."""
    return {
        f"{prefix}.{path}.{name}"
        for path, module in tower.named_modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("LayerNorm")
        for name, _ in module.named_parameters(recurse=False)
    }


class FrozenStatistics:
    """Mixed into the class of a BatchNorm module: `train()` leaves it in eval mode.

    The class is swapped in place, so names, buffers and the state dict stay, and the module stays frozen
    through whatever wraps it and calls `train()` on the whole model.
    """

    def train(self, mode: bool = True) -> Any:
        """Stay in eval mode, where BatchNorm neither uses nor updates the statistics of the batch."""
        return super().train(False)  # type: ignore[misc]


def _freeze_statistics(tower: nn.Module, prefix: str, locked: set[str]) -> None:
    for path, module in tower.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or isinstance(module, FrozenStatistics):
            continue
        own = {f"{prefix}.{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        if own <= locked:
            kind = type(module)
            module.__class__ = type(f"Frozen{kind.__name__}", (FrozenStatistics, kind), {})
            module.eval()


class LockRow(NamedTuple):
    """One line of the table of what trains; counts are of numbers, not of tensors."""

    group: str
    """Tower, index of the layer group, and what it holds."""
    trainable: int
    frozen: int


def trainable_table(model: DualEncoder) -> list[LockRow]:
    """Trainable and frozen parameter counts of every layer group, and of what belongs to no tower."""
    parameters = dict(model.named_parameters())
    rows = []
    for tower_name, tower in model.named_children():
        for index, group in enumerate(_groups_or_one(tower)):
            names = [f"{tower_name}.{name}" for name in group]
            rows.append(_row(f"{tower_name}[{index}] {_label(group)}", [parameters.pop(n) for n in names]))
    rows += [_row(name, [parameter]) for name, parameter in parameters.items()]
    return rows


def _groups_or_one(tower: nn.Module) -> list[list[str]]:
    try:
        return layer_groups(tower)
    except UserError:
        return [[name for name, _ in tower.named_parameters()]]


def _row(label: str, parameters: list[nn.Parameter]) -> LockRow:
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    return LockRow(label, trainable, sum(p.numel() for p in parameters) - trainable)


def _label(names: list[str]) -> str:
    """The first modules of a group; a block stands for all that is in it."""
    modules = dict.fromkeys(re.sub(r"(\.\d+)\..*|\.(?:weight|bias)$", r"\1", name) for name in names)
    first, *others = modules
    return f"{first} + {len(others)}" if others else first
