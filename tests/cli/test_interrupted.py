"""Runs that are stopped, killed or driven into the wall, and the same command again."""

import json
import signal
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from launched import Launched, torchrun_environments

from commands import Finished, small_run
from shardclip import cli
from shardclip.training.checkpoint import published
from shardclip.training.failure import EXIT_REQUEUE

STEPS, GLOBAL_BATCH = 8, 8


def command(folder: Path, name: str, world_size: int, *more: str) -> list[str]:
    flags = (
        f"--name {name} --dataset-type synthetic --train-num-samples {STEPS * GLOBAL_BATCH // 2} --epochs 2 "
        f"--batch-size {GLOBAL_BATCH // world_size} --streams 4 --lr 1e-3 --grad-clip-norm 1 --ema-decay 0.9 "
        f"--save-every {GLOBAL_BATCH} --val-num-samples 16 --log-metric-every-n-steps 1 --fsdp"
    )
    return ["train", *small_run(folder), *flags.split(), *more]


def losses(folder: Path, name: str) -> dict[int, float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss of each step of the run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    finished = Finished(folder, command(folder, "calm", 2))
    assert finished.codes == [0, 0], finished.said
    return losses(folder, "calm")


def interrupt(folder: Path, name: str, number: signal.Signals, rank: int) -> list[int | None]:
    """Start the run on two ranks and send one of them a signal once a checkpoint is there; the exit codes."""
    checkpoints = folder / "runs" / name / "checkpoints"
    words = command(folder, name, 2)
    with Launched(folder, torchrun_environments(2), cli.main, words) as launched:
        sentinels = [process.sentinel for process in launched.processes]
        while not (checkpoints.exists() and published(checkpoints)):
            assert not wait(sentinels, 0.02), launched.all_said
        launched.processes[rank]._popen._send_signal(number)
        return launched.end()


@pytest.mark.parametrize(
    ("number", "world_size"),
    [
        (signal.SIGTERM, 2),
        (signal.SIGKILL, 2),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 4, marks=pytest.mark.long),
    ],
)
def test_b25_b40_b47_a_run_that_is_cut_goes_on_under_the_same_command(
    tmp_path: Path, reference: dict[int, float], number: signal.Signals, world_size: int
) -> None:
    codes = interrupt(tmp_path, "cut", number, rank=1)
    if number == signal.SIGTERM:
        assert codes == [EXIT_REQUEUE] * 2
    else:
        assert all(codes)
    before = losses(tmp_path, "cut")
    assert len(before) < STEPS
    again = command(tmp_path, "cut", world_size, "--resume", "latest")
    finished = Finished(tmp_path, again, world_size)
    assert finished.codes == [0] * world_size, finished.said
    found = losses(tmp_path, "cut")
    assert found.keys() == reference.keys()
    # On other numbers of ranks sums are taken in another order.
    assert found == (reference if world_size == 2 else pytest.approx(reference, rel=1e-5))


def test_b32_a_run_that_diverges_stops_and_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    flags = ["--lr", "1e30", "--lr-scheduler", "const", "--max-skipped-steps", "3"]
    finished = Finished(tmp_path, command(tmp_path, "wild", 2, *flags))
    assert finished.codes == [2, 2], finished.said
    assert finished.said.count("3 steps in a row had a gradient that is not finite") == 1
    newest = published(tmp_path / "runs" / "wild" / "checkpoints")[-1]
    out = tmp_path / "model.safetensors"
    assert cli.main(["export", str(newest), "--out", str(out)]) == 0
    assert out.stat().st_size > 1_000_000


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_b31_half_precision_weights_are_raised_and_train(tmp_path: Path, precision: str) -> None:
    from shardclip.models import factory
    from shardclip.models.factory import ModelConfig

    flags = command(tmp_path, "fine", 1)
    spec = factory.resolve(ModelConfig(model_config=str(tmp_path / "tiny.json")))
    half = {name: value.half() for name, value in factory.build(spec, seed=0).state_dict().items()}
    torch.save(half, tmp_path / "half.pt")
    more = ["--pretrained", str(tmp_path / "half.pt"), "--precision", precision]
    finished = Finished(tmp_path, [*flags, *more], 1)
    assert finished.codes == [0], finished.said
    assert "weights and moments float32" in finished.said
    assert all(abs(loss) < 100 for loss in losses(tmp_path, "fine").values())
