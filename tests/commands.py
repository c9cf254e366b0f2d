"""`shardclip` as several processes, each with an exit code of its own, and a model small enough for tests."""

import json
from pathlib import Path
from typing import Any

from launched import Launched, torchrun_environments

from shardclip import cli

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def small_run(folder: Path) -> list[str]:
    """The flags of a training run of two steps on two ranks that needs nothing but these."""
    model = folder / "tiny.json"
    model.write_text(json.dumps(MODEL))
    flags = (
        f"--model-config {model} --output-dir {folder / 'runs'} --name first --device cpu --precision fp32 "
        "--batch-size 4 --train-num-samples 16 --epochs 1 --warmup 0 --workers 0 --log-every-n-steps 1"
    )
    return flags.split()


STEPS, GLOBAL_BATCH = 8, 8


def eight_steps(folder: Path, name: str, world_size: int, *more: str) -> list[str]:
    """The words of a run of two epochs of four steps, evaluated after each, saved after every other step."""
    flags = (
        f"--name {name} --dataset-type synthetic --train-num-samples {STEPS * GLOBAL_BATCH // 2} --epochs 2 "
        f"--batch-size {GLOBAL_BATCH // world_size} --streams 4 --lr 1e-3 --grad-clip-norm 1 --ema-decay 0.9 "
        f"--save-every {2 * GLOBAL_BATCH} --val-num-samples 16 --log-metric-every-n-steps 1 --fsdp"
    )
    return ["train", *small_run(folder), *flags.split(), *more]


def rows(folder: Path, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a file of the run; none where it is not there."""
    path = folder / "runs" / name / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path, name: str) -> dict[int, float]:
    """The loss by step; a step that was made twice counts as it was last."""
    return {row["step"]: row["loss"] for row in rows(folder, name) if "loss" in row}


class Finished:
    """What the ranks of one command left."""

    def __init__(self, folder: Path, words: list[str], world_size: int = 2) -> None:
        with Launched(folder, torchrun_environments(world_size), cli.main, words) as launched:
            self.codes = launched.end()
            self.said = launched.all_said
