"""The whole configuration of a training run: one concern after the other, and what must hold between them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardclip.errors import UserError
from shardclip.launch import LaunchConfig
from shardclip.models.factory import ModelConfig
from shardclip.models.locking import LockConfig
from shardclip.training import compatibility, parsing
from shardclip.training.checkpoint.config import CheckpointConfig
from shardclip.training.checkpoint.remote import RemoteConfig
from shardclip.training.data.config import DataConfig
from shardclip.training.distributed import DistributedConfig
from shardclip.training.ema import EmaConfig
from shardclip.training.evaluation.config import EvaluationConfig
from shardclip.training.objective import ObjectiveConfig
from shardclip.training.optimizer import OptimizerConfig
from shardclip.training.parallel import ParallelConfig
from shardclip.training.tracking import TrackingConfig

PRESETS = Path(__file__).parents[1] / "presets"
"""YAML files of known recipes, each with its source."""


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
    """Check settings, model and data, take one small step and save once, in a folder that is then removed;
    and plan the memory of a whole step."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accum_freq", "max_skipped_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 1 or more")
        if self.output_dir.lower() == "none":
            raise UserError("--output-dir none: a run always has a folder")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `shardclip train` can be told."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lock: LockConfig = field(default_factory=LockConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(frozen=True)
class TrainCommand(TrainConfig):
    """With the flags that start processes: what `shardclip train --help` shows."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)


def show_help() -> None:
    """Print the flags of `shardclip train`, those that start processes included."""
    parsing.show_help(
        TrainCommand,
        "shardclip train",
        "Train a CLIP-like model. --config reads a YAML file (a run's config.yaml too) or a preset; flags go "
        "over it. open_clip's flag names are accepted.",
    )


_LAUNCH = (LaunchConfig,)


def read(argv: Sequence[str], beside: Sequence[type] = _LAUNCH) -> parsing.Parsed[TrainConfig]:
    """Flags over the files of `--config` over the defaults, not yet held against each other.

    Args:
        argv: flags and their values.
        beside: dataclasses of the verb's other flags, which are not in `argv` unless they are misspelt.
    """
    files, words = _take_config_flag(argv)
    return parsing.parse(
        TrainConfig,
        words,
        files=files,
        rewrite=compatibility.rewrite,
        foreign=["config", *parsing.names_of(*beside), *compatibility.ANSWERS],
    )


def parse(argv: Sequence[str], beside: Sequence[type] = _LAUNCH) -> TrainConfig:
    """As `read`, once all is well.

    Raises:
        UserError: one list of all unknown names, wrong types and contradictions.
    """
    return parse_with_notes(argv, beside)[0]


def parse_with_notes(argv: Sequence[str], beside: Sequence[type] = _LAUNCH) -> tuple[TrainConfig, list[str]]:
    """As `parse`, and a line for each flag of open_clip's that asks for what is so anyway."""
    parsed = read(argv, beside)
    problems = parsed.problems + validate(parsed.config)
    if problems:
        raise UserError("\n".join(["these settings are not right:", *(f"  - {line}" for line in problems)]))
    return parsed.config, compatibility.notes(parsed.names)


def _take_config_flag(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files given with `--config`, and the other words."""
    files: list[Path] = []
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word == "--config":
            if (name := next(rest, None)) is None:
                raise UserError("--config: needs a YAML file or the name of a preset")
            files.append(_config_file(name))
        elif word.startswith("--config="):
            files.append(_config_file(word.removeprefix("--config=")))
        else:
            words.append(word)
    return files, words


def _config_file(name: str) -> Path:
    """The file meant by a path or by the name of a preset."""
    if Path(name).exists():
        return Path(name)
    presets = {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}
    if name not in presets:
        raise UserError(f"--config {name}: there is no such file, and the presets are {', '.join(presets)}")
    return presets[name]


def validate(config: TrainConfig) -> list[str]:
    """What cannot be between the concerns; one line each, none if all is well.

    What one concern can know by itself is refused where it is defined, by its `__post_init__`.
    """
    return [message for wrong, message in _contradictions(config) if wrong]


def _contradictions(config: TrainConfig) -> list[tuple[bool, str]]:
    run, data, objective, optimizer = config.run, config.data, config.objective, config.optimizer
    checkpoint, parallel = config.checkpoint, config.parallel
    sharded = parallel.fsdp or parallel.distributed_engine in ("fsdp", "hsdp")
    cooldown = optimizer.epochs_cooldown
    asked = _only_sharded(parallel)
    return [
        (
            data.train_data is None and data.dataset_type != "synthetic",
            "--train-data: nothing to train on; give shards or a table, or --dataset-type synthetic "
            "(`shardclip eval` evaluates without training)",
        ),
        (
            data.dataset_type == "synthetic" and data.train_num_samples is None,
            "--dataset-type synthetic needs --train-num-samples",
        ),
        (
            checkpoint.resume == "latest" and run.name is None,
            "--resume latest needs --name: without one every start is a new run",
        ),
        (
            checkpoint.keep_every is not None and checkpoint.keep_last is None,
            "--keep-every needs --keep-last: without it every checkpoint is kept",
        ),
        (
            checkpoint.delete_previous_checkpoint and checkpoint.keep_last not in (None, 1),
            f"--delete-previous-checkpoint keeps one checkpoint, --keep-last {checkpoint.keep_last}",
        ),
        (
            (objective.distill_model is None) != (objective.distill_pretrained is None),
            "--distill-model and --distill-pretrained are given together or not at all",
        ),
        (
            optimizer.lr_scheduler == "const-cooldown" and cooldown is None,
            "--lr-scheduler const-cooldown needs --epochs-cooldown",
        ),
        (
            cooldown is not None and cooldown > run.epochs,
            f"--epochs-cooldown {cooldown:g} is longer than --epochs {run.epochs}" if cooldown else "",
        ),
        (
            bool(asked) and not sharded,
            f"{', '.join(asked)}: only with --fsdp",
        ),
        (
            bool(parallel.fsdp_keep_gathered) and parallel.fsdp_no_reshard_after_forward,
            "--fsdp-keep-gathered names some units, --fsdp-no-reshard-after-forward all of them: give one",
        ),
        (
            config.distributed.device == "cpu" and parallel.precision in ("amp", "fp16"),
            f"--precision {parallel.precision} needs a GPU; on CPU take fp32 or amp_bf16",
        ),
    ]


def _only_sharded(parallel: ParallelConfig) -> list[str]:
    """The flags given that mean something under FSDP alone."""
    values = {
        "--fsdp-layers-to-wrap": parallel.fsdp_layers_to_wrap,
        "--fsdp-min-params": parallel.fsdp_min_params,
        "--fsdp-shard-size": parallel.fsdp_shard_size,
        "--fsdp-no-reshard-after-forward": parallel.fsdp_no_reshard_after_forward,
        "--fsdp-keep-gathered": parallel.fsdp_keep_gathered,
        "--fsdp-forward-prefetch": parallel.fsdp_forward_prefetch,
        "--fsdp-backward-prefetch": parallel.fsdp_backward_prefetch > 1,
        "--fsdp-cpu-offload": parallel.fsdp_cpu_offload,
    }
    return [flag for flag, value in values.items() if value]


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
