"""Runs that go on with other settings than they had."""

from pathlib import Path

import pytest
import torch

from commands import Finished, eight_steps
from shardclip.training.checkpoint import published, samples_of
from shardclip.training.checkpoint.export import unread_weights
from shardclip.training.checkpoint.storage import SafeReader, fill

IMAGE = "optimizer.visual."


def image_moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of the image tower's moments."""
    reader = SafeReader(checkpoint)
    saved = {key: kind for key, kind in reader.tensors().items() if key.startswith(IMAGE)}
    moments = {key: torch.empty(kind.size, dtype=kind.properties.dtype) for key, kind in saved.items()}
    fill(moments, reader)
    return moments


@pytest.mark.long
def test_b48_a_run_that_is_locked_and_unlocked_again_keeps_its_moments(tmp_path: Path) -> None:
    newest = []
    for epochs, more in ((1, []), (2, ["--lock-image"]), (3, [])):
        words = eight_steps(tmp_path, "run", 1, "--resume", "latest", "--override", *more)
        finished = Finished(tmp_path, [*words, "--epochs", str(epochs)], 1)
        assert finished.codes == [0], finished.said
        newest.append(published(tmp_path / "runs" / "run" / "checkpoints")[-1])
        if more:
            assert "changed on resuming: --lock-image: False then, True now" in finished.said
            assert "moments of frozen parameters are kept for later" in finished.said
    open_1, locked, open_again = map(image_moments, newest)
    assert open_1.keys() == locked.keys() == open_again.keys()
    assert open_1
    assert all(torch.equal(open_1[key], locked[key]) for key in open_1)
    steps = [moments[f"{IMAGE}proj.step"].item() for moments in (open_1, locked, open_again)]
    assert steps == [4, 4, 8]
    weights = [unread_weights(path)["visual.proj"].read() for path in newest]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_saving_by_the_clock_and_a_changed_rate_that_wants_override(tmp_path: Path) -> None:
    first = Finished(tmp_path, eight_steps(tmp_path, "run", 1, "--epochs", "1", "--save-minutes", "1e-9"), 1)
    assert first.codes == [0], first.said
    saved = [samples_of(path) for path in published(tmp_path / "runs" / "run" / "checkpoints")]
    assert saved == [8, 16, 24, 32]
    again = eight_steps(tmp_path, "run", 1, "--epochs", "1", "--resume", "latest", "--lr", "5e-4")
    refused = Finished(tmp_path, again, 1)
    assert refused.codes == [2], refused.said
    assert "--lr: 0.001 then, 0.0005 now" in refused.said
    assert "--override goes on with the new ones" in refused.said
    assert "Traceback" not in refused.said
