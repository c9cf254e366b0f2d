"""`shardclip train` from its flags to the folder that it leaves."""

import json
from pathlib import Path

import pytest
from commands import Finished, small_run
from PIL import Image

from shardclip import cli
from shardclip.training import config


def test_a_run_leaves_its_settings_its_numbers_and_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *small_run(tmp_path), "--dataset-type", "synthetic", "--fsdp", "--local-loss"]
    finished = Finished(tmp_path, words)
    assert finished.codes == [0, 0], finished.said
    run = tmp_path / "runs" / "first"
    assert finished.said.count("--local-loss: always on") == 1
    assert finished.said.count("Train Epoch: 0 [16/16 (100%)]") == 1
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples_seen"] for row in rows] == [8, 16]
    numbers = (
        "loss lr logit_scale grad_norm samples_per_second data_wait_share peak_memory_bytes slowest_rank"
    )
    assert set(numbers.split()) <= set(rows[0])
    (result,) = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    assert "image_to_text_R@1" in result
    assert any((run / "checkpoints").iterdir())
    assert config.parse(["--config", str(run / "config.yaml")]) == config.parse(words[1:])
    assert cli.main(["plot", str(run), "--out", str(tmp_path / "curves.png")]) == 0
    with Image.open(tmp_path / "curves.png") as curves:
        assert len(curves.convert("RGB").getcolors(2**20)) > 10
    assert cli.main(["compare", str(run)]) == 0
    assert "image_to_text_R@1" in capsys.readouterr().out

    again = Finished(tmp_path, ["train", "--config", str(run / "config.yaml"), "--name", "second"])
    assert again.codes == [0, 0], again.said
    second = [json.loads(line) for line in (tmp_path / "runs/second/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in second] == [row["loss"] for row in rows]
