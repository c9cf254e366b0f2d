"""`shardclip eval` and the example script on what training leaves behind and on open_clip's own files."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evaluation import small
from launched import HANG_SECONDS, Launched, torchrun_environments

from shardclip.cli import main
from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.export import UnreadTensor, write_model
from shardclip.models.factory import ModelConfig, ModelSpec
from shardclip.training.checkpoint import CheckpointConfig, Checkpoints, TrainState
from shardclip.training.data.config import DataConfig
from shardclip.training.data.image_input import ImageInput
from shardclip.training.distributed import current
from shardclip.training.evaluation.config import EvaluationConfig
from shardclip.training.evaluation.loading import load, locate
from shardclip.training.evaluation.results import Result, scalars
from shardclip.training.evaluation.run import evaluate

SCRIPT = Path(__file__).parents[2] / "scripts" / "zero_shot_eval.py"
FLAGS = ["--workers", "0", "--precision", "fp32", "--device", "cpu"]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    """The small architecture with open_clip's own vocabulary, as its own tokenizer needs it."""
    text_cfg = {**small.SPEC.model_cfg["text_cfg"], "vocab_size": 49408, "context_length": 16}
    model_cfg = {**small.SPEC.model_cfg, "text_cfg": text_cfg}
    config = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "size": small.SIZE}
    return replace(small.SPEC, model_cfg=model_cfg, preprocess_cfg=config)


@pytest.fixture(scope="module")
def folder(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint, the same model exported in two ways, and data."""
    folder = tmp_path_factory.mktemp("command")
    model = factory.build(spec, seed=3)
    tensors = {name: UnreadTensor.of(value) for name, value in model.state_dict().items()}
    write_model(tensors, spec, folder / "hf", format="hf")
    write_model(tensors, spec, folder / "file" / "model.pt", format="pt")
    spec_file = folder / "run" / "model.json"
    spec_file.parent.mkdir()
    spec.save(spec_file)
    state = TrainState(model, torch.optim.AdamW(model.parameters()), progress={"samples_seen": 0})
    checkpoints = Checkpoints(folder / "run" / "checkpoints", CheckpointConfig(), current())
    checkpoints.save(0, state)
    checkpoints.wait()
    small.write_pairs(folder / "pairs", repeated=False)
    small.write_labelled(folder / "labelled")
    return folder


@pytest.fixture(scope="module")
def expected(spec: ModelSpec, folder: Path) -> list[Result]:
    return evaluate(
        factory.build(spec, seed=3),
        EvaluationConfig(zeroshot_data=str(folder / "labelled")),
        DataConfig(val_data=str(folder / "pairs"), workers=0),
        ImageInput.from_preprocess_cfg(spec.preprocess_cfg),
        factory.tokenizer(spec),
        processes=current(),
    )


@pytest.mark.parametrize("model", ["run", "hf", "file/model.pt"])
def test_a_run_and_what_is_exported_from_it_give_the_models_figures(
    folder: Path, expected: list[Result], model: str, tmp_path: Path
):
    data = ["--val-data", str(folder / "pairs"), "--zeroshot-data", str(folder / "labelled")]
    out = tmp_path / "results.jsonl"
    assert main(["eval", str(folder / model), *data, "--results", str(out), *FLAGS]) == 0
    classified, retrieved = [json.loads(line) for line in out.read_text().splitlines()]
    for found, wanted in ((classified, expected[0]), (retrieved, expected[1])):
        assert {name: found["metrics"][name] for name in wanted.metrics} == pytest.approx(
            wanted.metrics, abs=1e-6
        )
    assert classified["dataset"] == "labelled"
    assert classified["task"] == "zeroshot_classification"
    assert (classified["samples"], classified["classes"], classified["templates"]) == (13, 5, 3)
    assert classified["names_digest"] == expected[0].names_digest
    assert retrieved["task"] == "zeroshot_retrieval"
    assert retrieved["samples"] == 21
    assert retrieved["metrics"]["image_retrieval_recall@5"] == retrieved["metrics"]["text_to_image_R@5"]
    assert set(classified) >= {"dataset", "model", "pretrained", "task", "metrics", "language"}


def test_two_processes_with_a_sharded_model_give_the_same_figures(
    folder: Path, expected: list[Result], tmp_path: Path
):
    data = ["--val-data", str(folder / "pairs"), "--zeroshot-data", str(folder / "labelled")]
    out = tmp_path / "results.jsonl"
    words = ["eval", str(folder / "run"), *data, "--results", str(out), "--fsdp", *FLAGS]
    with Launched(tmp_path, torchrun_environments(2), main, words) as launched:
        assert launched.end() == [0, 0], launched.all_said
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [result["samples"] for result in found] == [13, 21]
    for result, wanted in zip(found, expected, strict=True):
        assert {name: result["metrics"][name] for name in wanted.metrics} == pytest.approx(
            wanted.metrics, abs=1e-6
        )


@pytest.mark.parametrize(("data", "place"), [("labelled", 0), ("pairs", 1)])
def test_data_of_either_kind_is_told_by_what_it_holds(
    folder: Path, expected: list[Result], data: str, place: int, capsys: pytest.CaptureFixture[str]
):
    assert main(["eval", str(folder / "run"), "--data", str(folder / data), *FLAGS]) == 0
    (found,) = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert found["task"] == expected[place].task
    wanted = expected[place].metrics
    assert {name: found["metrics"][name] for name in wanted} == pytest.approx(wanted, abs=1e-6)


def test_a_file_of_open_clips_own_model(spec: ModelSpec, folder: Path, tmp_path: Path):
    import open_clip

    theirs = open_clip.create_model(f"local-dir:{folder / 'hf'}")
    torch.save({"state_dict": {f"module.{k}": v for k, v in theirs.state_dict().items()}}, tmp_path / "e.pt")
    config = tmp_path / "small.json"
    config.write_text(json.dumps(spec.model_cfg))
    saved = locate(str(tmp_path / "e.pt"), ModelConfig(model_config=str(config)))
    tokens = factory.tokenizer(spec)(["a cat"])
    with torch.no_grad():
        ours = load(saved).eval()(text=tokens).text_features
        assert torch.allclose(ours, theirs.eval().encode_text(tokens, normalize=True), atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model is named"),
        (["ViT-B-32", "--val-data", "x"], "needs --pretrained"),
        (["gone.pt", "--val-data", "x"], "no such file"),
        (["ViT-B-32", "--pretrained", "x"], "nothing to evaluate on"),
        (["ViT-B-32", "--pretrained", "x", "--data", "a", "--val-data", "b"], "--data stands for --val-data"),
        (["ViT-B-32", "--val-dat", "x"], "nearest is --val-data"),
        (["ViT-B-32", "--nprocs", "2"], "nearest is --nproc"),
    ],
)
def test_wrong_words_are_said(words: list[str], message: str, capfd: pytest.CaptureFixture[str]):
    assert main(["eval", *words]) == 2
    assert message in capfd.readouterr().err


def test_a_moving_average_that_is_not_there(folder: Path):
    with pytest.raises(UserError, match="leave out --ema"):
        load(locate(str(folder / "run"), ModelConfig()), ema=True)


@pytest.mark.long
def test_the_example_script_on_two_processes(folder: Path, expected: list[Result]):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT)]
    ran = subprocess.run(
        [sys.executable, *command, str(folder / "run"), str(folder / "labelled")],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    figures = dict(line.split() for line in ran.stdout.splitlines() if line.startswith(("acc", "samples")))
    assert float(figures["samples"]) == 13
    assert float(figures["acc1"]) == pytest.approx(scalars(expected)["labelled-zeroshot-val-top1"], abs=1e-4)


def test_flat_numbers_have_open_clips_names():
    imagenet = Result("imagenet1k", "m", "p", "zeroshot_classification", {"acc1": 0.4, "acc5": 0.7}, 9)
    second = Result("imagenetv2", "m", "p", "zeroshot_classification", {"acc1": 0.3}, 9)
    pairs = Result("coco", "m", "p", "zeroshot_retrieval", {"clip_val_loss": 2.0}, 21)
    assert scalars([imagenet, second, pairs]) == {
        "imagenet-zeroshot-val-top1": 0.4,
        "imagenet-zeroshot-val-top5": 0.7,
        "imagenetv2-zeroshot-val-top1": 0.3,
        "clip_val_loss": 2.0,
        "num_samples": 21,
    }
