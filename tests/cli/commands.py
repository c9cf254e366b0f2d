"""`shardclip` as several processes, each with an exit code of its own, and a model small enough for tests."""

import json
from pathlib import Path

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


class Finished:
    """What the ranks of one command left."""

    def __init__(self, folder: Path, words: list[str], world_size: int = 2) -> None:
        with Launched(folder, torchrun_environments(world_size), cli.main, words) as launched:
            self.codes = launched.end()
            self.said = launched.all_said
