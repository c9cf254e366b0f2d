"""The demo's whole way, in small: prepare, train under each engine, report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resvg_py", reason="needs the extra [demo]")

from prepare import load_concepts, write_data

ROOT = Path(__file__).parents[2]
STEPS, GLOBAL_BATCH = 20, 256
# Those of the first 20 steps of the whole run, whose warm-up is of 200 steps to 3e-3.
RATES = ["--warmup", "20", "--lr", "3e-4"]
ENGINES = {
    "none": ["--batch-size", str(GLOBAL_BATCH)],
    "ddp": ["--nproc", "2", "--ddp", "--batch-size", str(GLOBAL_BATCH // 2)],
    "fsdp": ["--nproc", "2", "--fsdp", "--batch-size", str(GLOBAL_BATCH // 2)],
}


def run(*words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small data (`emoji`) and one run of the demo's settings under each engine."""
    folder = tmp_path_factory.mktemp("demo")
    write_data(load_concepts()[::4], folder / "emoji")
    validation = folder / "emoji" / "validation"
    data = ("--train-data", f"{folder}/emoji/train/{{0..7}}.tar", "--val-data", validation)
    for engine, flags in ENGINES.items():
        run(
            *("-m", "shardclip", "train", "--config", "scripts/demo/emoji.yaml", *flags, *data),
            *("--zeroshot-data", validation, "--name", engine, "--output-dir", folder),
            *("--epochs", "1", "--train-num-samples", str(STEPS * GLOBAL_BATCH), *RATES),
            *("--log-metric-every-n-steps", "1"),
        )
    return folder


def losses(run_folder: Path) -> list[float]:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.long
def test_every_engine_has_the_same_losses(trained: Path) -> None:
    reference = losses(trained / "none")
    assert len(reference) == STEPS
    assert reference[-1] < reference[0]
    assert losses(trained / "ddp") == pytest.approx(reference, rel=1e-5)
    assert losses(trained / "fsdp") == pytest.approx(reference, rel=1e-5)


@pytest.mark.long
def test_the_report_prints_figures_and_leaves_pictures(trained: Path) -> None:
    printed = run("scripts/demo/report.py", trained / "fsdp", "--data", trained / "emoji")
    for words in ("image to text", "text to image", "chance", "thumbnail", "zero-shot, "):
        assert words in printed
    for picture in ("curves.png", "retrieval.png"):
        assert (trained / "fsdp" / picture).read_bytes().startswith(b"\x89PNG")
