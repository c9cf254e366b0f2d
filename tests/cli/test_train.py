"""`shardclip train` from its flags to the folder that it leaves."""

import json
import re
import shlex
from pathlib import Path

import pytest
from data.shards import write_shards
from PIL import Image
from test_flags import COMMANDS

from commands import Finished, small_run
from shardclip import cli
from shardclip.training import config, rehearsal
from shardclip.training.planning import extrapolation, fitting
from shardclip.training.planning.fitting import Memory


def test_a_run_leaves_its_settings_its_numbers_and_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *small_run(tmp_path), "--dataset-type", "synthetic", "--fsdp", "--local-loss"]
    finished = Finished(tmp_path, words)
    assert finished.codes == [0, 0], finished.said
    run = tmp_path / "runs" / "first"
    assert finished.said.count("--local-loss: always on") == 1
    assert finished.said.count("Train Epoch: 0 [16/16 (100%)]") == 1
    assert finished.said.count("data: 16 samples used, 0 of them met before; 0 left out") == 1
    said_seconds = re.findall(r"(\w+) +[\d.]+ s$", (run / "out.log").read_text(), re.MULTILINE)
    assert said_seconds == ["model", "engine", "data", "resume"], "B08: each phase of the start"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples_seen"] for row in rows] == [8, 16]
    numbers = (
        "loss lr logit_scale grad_norm samples_per_second data_wait_share peak_memory_bytes slowest_rank"
    )
    assert set(numbers.split()) <= set(rows[0])
    (result,) = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    assert "image_to_text_R@1" in result
    with Image.open(run / "pictures" / "retrieval-16.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**20)) > 10
    assert any((run / "checkpoints").iterdir())
    assert config.parse(["--config", str(run / "config.yaml")]) == config.parse(words[1:])
    assert cli.main(["plot", str(run), "--out", str(tmp_path / "curves.png")]) == 0
    with Image.open(tmp_path / "curves.png") as curves:
        assert len(curves.convert("RGB").getcolors(2**20)) > 10
    assert cli.main(["compare", str(run)]) == 0
    assert "image_to_text_R@1" in capsys.readouterr().out
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out" / "model.safetensors")]) == 0
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1_000_000

    again = Finished(tmp_path, ["train", "--config", str(run / "config.yaml"), "--name", "second"])
    assert again.codes == [0, 0], again.said
    second = [json.loads(line) for line in (tmp_path / "runs/second/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in second] == [row["loss"] for row in rows]


@pytest.mark.long
def test_b45_a_source_that_stalls_is_named_as_the_data(tmp_path: Path) -> None:
    """Four shards, each of which takes half a second to open; the ranks count them, and read two of them each
    before the first step."""
    data = write_shards(tmp_path / "data", [4] * 4)
    slow = f"pipe:sleep 0.5; cat {data}/{{00000..00003}}.tar"
    flags = small_run(tmp_path)
    number = flags.index("--train-num-samples")
    words = ["train", *flags[:number], *flags[number + 2 :], "--train-data", slow, "--streams", "2"]
    finished = Finished(tmp_path, [*words, "--log-metric-every-n-steps", "1"])
    assert finished.codes == [0, 0], finished.said
    assert finished.said.count("16 samples were counted by reading 4 remote shards") == 1
    assert finished.said.count("data: 16 samples used, 0 of them met before; 0 left out") == 1
    first = json.loads((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()[0])
    assert first["data_time"] >= 1.0
    assert first["data_wait_share"] == pytest.approx(first["data_time"] / first["batch_time"], rel=1e-3)
    assert f"Wait: {100 * first['data_wait_share']:.0f}%" in finished.said


def test_a_dry_run_trains_one_step_plans_the_whole_one_and_leaves_nothing(tmp_path: Path) -> None:
    words = ["train", *small_run(tmp_path), "--dataset-type", "synthetic", "--fsdp", "--dry-run"]
    finished = Finished(tmp_path, words)
    assert finished.codes == [0, 0], finished.said
    assert finished.said.count("Train Epoch: 0 [4/4 (100%)]") == 1
    assert finished.said.count("dry run: settings, data, model, one step and one checkpoint are well") == 1
    assert len(re.findall(r"dry run: planned: 0\.\d\d GiB of \S+ on each of 2 ranks", finished.said)) == 1
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_step_that_does_not_fit_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = Memory("backward", {"parameters": 3 * rehearsal.GIB, "activations": 2 * rehearsal.GIB}, 0)
    monkeypatch.setattr(fitting, "memory", lambda found, settings: needed)
    monkeypatch.setattr(extrapolation, "predict", lambda *_: None)
    settings = config.parse(["--dataset-type", "synthetic", "--train-num-samples", "8"])
    for gib, code in ((6, 0), (4, 1)):
        told = rehearsal.Rehearsal(settings)
        told._machines = rehearsal.Machines(2, 2, gib * rehearsal.GIB)
        assert told.plan() == code
        said = capsys.readouterr().out
        assert f"5.00 GiB of {gib}.00 on each of 2 ranks, fullest in backward (parameters 3.00" in said
        assert ("--gpus 2 and --gpu-memory 4, says what to change" in said) == (code == 1)


def test_index_counts_samples_and_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_shards(tmp_path / "whole", [3, 2])
    assert cli.main(["index", whole]) == 0
    assert "5 samples in 2 shards" in capsys.readouterr().out
    shard = tmp_path / "whole" / "00001.tar"
    shard.write_bytes(shard.read_bytes()[:530])
    assert cli.main(["index", str(shard)]) == 1
    assert f"damaged: {shard}" in capsys.readouterr().out


def test_a_verb_that_is_none_and_words_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["trian"], ["plot"], ["compare"], ["index"], ["export"]):
        assert cli.main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5
    assert said[0].startswith("shardclip: no verb 'trian'; the nearest is train")
    assert cli.main([]) == 2
    assert "usage: shardclip VERB" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_open_clip_start_unchanged(tmp_path: Path, command: str) -> None:
    tiny = (
        "--dataset-type synthetic --train-data-upsampling-factors None --lock-text "
        "--lock-text-unlocked-layers 0 --distill-model None --distill-pretrained None "
        "--imagenet-val None --dry-run"
    )
    words = ["train", *shlex.split(command), *small_run(tmp_path), *tiny.split()]
    finished = Finished(tmp_path, words, world_size=1)
    assert finished.codes == [0], finished.said
    assert "dry run: settings, data, model, one step and one checkpoint are well" in finished.said
