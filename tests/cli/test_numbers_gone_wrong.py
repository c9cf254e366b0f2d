"""Runs whose numbers overflow: a rate that is too high, weights in half precision."""

import re
from pathlib import Path

import pytest
import torch

from commands import Finished, eight_steps, losses
from shardclip import cli
from shardclip.training.checkpoint import published


@pytest.mark.parametrize("cadence", ["1", "100"])
def test_b32_a_run_that_diverges_stops_and_leaves_a_whole_checkpoint(tmp_path: Path, cadence: str) -> None:
    """Whether a step's numbers are wanted at once, for a line of the log, or are seen after the next step."""
    flags = ["--lr", "1e30", "--lr-scheduler", "const", "--max-skipped-steps", "3"]
    flags += ["--log-every-n-steps", cadence, "--log-metric-every-n-steps", cadence]
    flags += ["--no-async-save"]  # the run may end before what writes beside it
    finished = Finished(tmp_path, eight_steps(tmp_path, "wild", 2, *flags))
    assert finished.codes == [2, 2], finished.said
    assert finished.said.count("3 steps in a row had a gradient that is not finite") == 1
    skipped = re.findall(r"step (\d+): the gradient is not finite, nothing was updated", finished.said)
    assert skipped == ["2", "3", "4"]
    newest = published(tmp_path / "runs" / "wild" / "checkpoints")[-1]
    out = tmp_path / "model.safetensors"
    assert cli.main(["export", str(newest), "--out", str(out)]) == 0
    assert out.stat().st_size > 1_000_000


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_b31_half_precision_weights_are_raised_and_train(tmp_path: Path, precision: str) -> None:
    from shardclip.models import factory
    from shardclip.models.factory import ModelConfig

    flags = eight_steps(tmp_path, "fine", 1)
    spec = factory.resolve(ModelConfig(model_config=str(tmp_path / "tiny.json")))
    half = {name: value.half() for name, value in factory.build(spec, seed=0).state_dict().items()}
    torch.save(half, tmp_path / "half.pt")
    more = ["--pretrained", str(tmp_path / "half.pt"), "--precision", precision]
    finished = Finished(tmp_path, [*flags, *more], 1)
    assert finished.codes == [0], finished.said
    assert "weights and moments float32" in finished.said
    assert all(abs(loss) < 100 for loss in losses(tmp_path, "fine").values())
