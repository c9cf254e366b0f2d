"""`shardclip eval MODEL`: evaluate a saved run, an exported file or an open_clip model.

shardclip eval runs/my-run --data cifar10
shardclip eval runs/my-run --val-data 'val/{0..9}.tar' --imagenet-val imagenet/val
shardclip eval runs/my-run --ema --nproc 8 --zeroshot-data cifar10
shardclip eval ViT-B-32 --pretrained laion2b_s34b_b79k --zeroshot-data cifar10
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardclip.errors import UserError
from shardclip.launch import LaunchConfig, launch, split_launch_flags
from shardclip.models.factory import ModelConfig
from shardclip.training import compatibility, parsing
from shardclip.training.data.config import DataConfig
from shardclip.training.distributed import DistributedConfig, Processes
from shardclip.training.evaluation.config import EvaluationConfig
from shardclip.training.parallel import ParallelConfig

_USAGE = (
    "MODEL comes first: the folder of a run or of a checkpoint, an exported folder or file, or a name of "
    "open_clip's list with --pretrained."
)


@dataclass(frozen=True)
class OutputConfig:
    """What is evaluated, with which weights, and where the results go."""

    data: str | None = None
    """Data of either kind, told apart by what it holds: labelled pictures (--zeroshot-data), pairs
    (--val-data), or samples that are both."""
    ema: bool = False
    """Evaluate the moving average of the weights."""
    results: str | None = None
    """File that the results are added to, one JSON object a line in CLIP_benchmark's form."""


@dataclass(frozen=True)
class EvalConfig:
    """Everything that `shardclip eval` can be told."""

    output: OutputConfig = field(default_factory=OutputConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True)
class EvalCommand(EvalConfig):
    """With the flags that start processes: what `shardclip eval --help` shows."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)


def main(argv: Sequence[str]) -> int:
    """Start the processes that `--nproc` asks for, or be one of them; returns the exit code.

    Raises:
        UserError: flags that are unknown or wrong, or no model.
    """
    if "-h" in argv or "--help" in argv:
        parsing.show_help(EvalCommand, "shardclip eval MODEL", f"Evaluate a model. {_USAGE}")
        return 0
    if not argv or argv[0].startswith("-"):
        raise UserError(f"shardclip eval MODEL [FLAGS]: no model is named. {_USAGE}")
    source, flags = argv[0], argv[1:]
    launch_config, words = split_launch_flags(flags)
    others = [*parsing.names_of(LaunchConfig), *compatibility.ANSWERS]
    parsed = parsing.parse(EvalConfig, words, rewrite=compatibility.rewrite, foreign=others)
    if parsed.problems:
        lines = [f"  - {line}" for line in parsed.problems]
        raise UserError("\n".join(["these settings are not right:", *lines]))
    if launch_config.nproc is not None:
        return launch(launch_config, ["eval", source, *words])

    from shardclip.training.worker import run_worker

    return run_worker(
        lambda processes: evaluate_command(source, parsed.config, processes), parsed.config.distributed
    )


def with_data(config: EvalConfig) -> EvalConfig:
    """The settings with `--data` in the place of --zeroshot-data, of --val-data, or of both.

    Raises:
        UserError: it holds neither labels nor captions, or the place is taken.
    """
    from shardclip.training.data.finite import roles_in
    from shardclip.training.evaluation.run import split_of

    data = config.output.data
    if data is None:
        return config
    if config.data.val_data or config.evaluation.zeroshot_data:
        raise UserError("--data stands for --val-data and --zeroshot-data: leave those out, or --data")
    split = split_of(data)
    roles = roles_in(split, config.data)
    if "cls" in roles:
        config = replace(config, evaluation=replace(config.evaluation, zeroshot_data=data))
    if {"text", "json"} & roles:
        config = replace(config, data=replace(config.data, val_data=split))
    if not {"cls", "text", "json"} & roles:
        raise UserError(f"--data {data}: neither labels (.cls, folders of classes) nor captions are in it")
    return config


def evaluate_command(source: str, config: EvalConfig, processes: Processes) -> int:
    """Load, evaluate, and write the results; every rank calls this. Returns the exit code.

    Raises:
        UserError: the model or the data cannot be used.
    """
    from shardclip.models import factory
    from shardclip.training.data.image_input import ImageInput
    from shardclip.training.evaluation.loading import load, locate
    from shardclip.training.evaluation.run import evaluate
    from shardclip.training.parallel import parallelize

    with processes.together("looking at the data"):
        config = with_data(config)
    wanted = config.evaluation
    if not any((config.data.val_data, wanted.imagenet_val, wanted.imagenet_v2, wanted.zeroshot_data)):
        raise UserError(
            "there is nothing to evaluate on: give --data, --val-data, --zeroshot-data, --imagenet-val or "
            "--imagenet-v2"
        )
    logging.basicConfig(level=logging.INFO if processes.is_primary else logging.WARNING, format="%(message)s")
    with processes.together("loading the model"):
        saved = locate(source, config.model)
        tokenize = factory.tokenizer(saved.spec)
        weights = load(saved, ema=config.output.ema) if processes.is_primary else None
        model = factory.build_meta(saved.spec)
    engine = parallelize(model, config.parallel, processes, source=weights, blank_text=tokenize([""]))
    results = evaluate(
        engine.module,
        config.evaluation,
        config.data,
        ImageInput.from_preprocess_cfg(saved.spec.preprocess_cfg),
        tokenize,
        processes=processes,
        model_name=saved.spec.name,
        pretrained=saved.origin + (" (moving average)" if config.output.ema else ""),
    )
    with processes.together("writing the results"):
        if processes.is_primary:
            lines = [json.dumps(result.to_json()) for result in results]
            print("\n".join(lines), file=sys.stdout, flush=True)
            if config.output.results is not None:
                path = Path(config.output.results)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as file:
                    file.write("".join(f"{line}\n" for line in lines))
    return 0
