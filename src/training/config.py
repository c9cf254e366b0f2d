"""The whole configuration of a training run: one concern after the other, and what must hold between them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardclip.errors import UserError
from shardclip.models.factory import ModelConfig
from shardclip.models.locking import LockConfig
from shardclip.training import compatibility, parsing
from shardclip.training.checkpoint.config import CheckpointConfig
from shardclip.training.data.config import DataConfig
from shardclip.training.distributed import DistributedConfig
from shardclip.training.objective import ObjectiveConfig
from shardclip.training.optimizer import OptimizerConfig
from shardclip.training.parallel import ParallelConfig
from shardclip.training.tracking import TrackingConfig


@dataclass(frozen=True)
class RunConfig:
    """The run: its name, its length, its batch."""

    name: str | None = None
    """Name of the run, and of its folder. Default: made of the time, the model, and the main settings."""
    output_dir: str = "runs"
    """Folder that holds the folders of runs (open_clip's --logs)."""
    epochs: int = 32
    """Epochs to train for; an epoch is --train-num-samples samples."""
    batch_size: int = 64
    """Samples per rank and step, before --accum-freq multiplies them."""
    accum_freq: int = 1
    """Micro-batches per step: the contrastive loss sees all of them as one batch."""
    seed: int = 0
    """Seed of initial weights, data order, dropout and augmentation."""
    max_skipped_steps: int = 10
    """Stop after so many steps in a row whose gradient was not finite."""
    dry_run: bool = False
    """Check the settings, print the plan, read one batch, and take one step at tiny size."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `shardclip train` can be told."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lock: LockConfig = field(default_factory=LockConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


def parse(argv: Sequence[str]) -> TrainConfig:
    """Flags over the file of `--config` over the defaults.

    Raises:
        UserError: one list of all unknown names, wrong types and contradictions.
    """
    files, words = _take_config_flag(argv)
    parsed = parsing.parse(
        TrainConfig,
        words,
        prog="shardclip train",
        description="Train a CLIP-like model. --config FILE reads settings from YAML; flags go over it.",
        files=files,
        rewrite=compatibility.rewrite,
        foreign=compatibility.ANSWERS,
    )
    problems = parsed.problems + validate(parsed.config)
    if problems:
        raise UserError("\n".join(["The settings are not right:", *(f"  - {line}" for line in problems)]))
    return parsed.config


def _take_config_flag(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files given with `--config`, and the other words."""
    files: list[Path] = []
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word == "--config":
            if (file := next(rest, None)) is None:
                raise UserError("--config: needs the path of a YAML file")
            files.append(Path(file))
        elif word.startswith("--config="):
            files.append(Path(word.removeprefix("--config=")))
        else:
            words.append(word)
    return files, words


def validate(config: TrainConfig) -> list[str]:
    """What contradicts itself between the settings; one line each, empty if all is well."""
    run = config.run
    problems = []
    for name in ("epochs", "batch_size", "accum_freq"):
        if getattr(run, name) < 1:
            problems.append(f"--{name.replace('_', '-')}: must be at least 1, is {getattr(run, name)}")
    return problems


def as_dict(config: Any) -> dict[str, dict[str, Any]]:
    """The settings as plain values (numbers, strings, lists, dicts), by concern and name."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return {concern: plain(fields) for concern, fields in dataclasses.asdict(config).items()}


def save(config: TrainConfig, path: Path) -> None:
    """Write every setting, defaults included, as YAML that `shardclip train --config` reads back."""
    text = yaml.safe_dump(as_dict(config), sort_keys=False, allow_unicode=True)
    path.write_text(f"# shardclip train --config {path.name}\n{text}", encoding="utf-8")
