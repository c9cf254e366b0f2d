"""What a run says: on a terminal, in plain lines, in files; and what is drawn from it."""

import json
import logging
import math
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from ranks import RankPool

from shardclip.errors import UserError
from shardclip.training import distributed
from shardclip.training.distributed import Processes
from shardclip.training.tracking import Tracker, TrackingConfig
from shardclip.training.tracking.lines import Clock, scale_text, training_line

METRICS = {
    "loss": 2.5,
    "contrastive_loss": 2.5,
    "lr": 1e-4,
    "logit_scale": 14.2857,
    "logit_scale_bound": 100.0,
    "grad_norm": 3.25,
    "samples_per_second": 1000.0,
    "samples_per_second_per_gpu": 500.0,
    "data_time": 0.01,
    "batch_time": 0.1,
    "data_wait_share": 0.1,
    "mfu": 0.42,
    "peak_memory_bytes": float(3 * 2**30),
    "slowest_rank": 0,
    "step_time_spread": 0.12,
}


class TwoRanks(Processes):
    """Rank 0 of two, without the other one."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """What the other rank, on another host, would add."""
        return [obj, "node17"]


def alone() -> Processes:
    return distributed.current()


def two() -> Processes:
    return TwoRanks(0, 2, 0, 1, torch.device("cpu"), "torchrun", "node16")


def train_a_little(folder: Path, processes: Processes, **settings: Any) -> None:
    """Twenty steps of 100 samples and one evaluation, in two epochs."""
    with Tracker(TrackingConfig(**settings), folder, processes) as tracker:
        tracker.message("a message [bold]as it is[/bold]")
        tracker.begin(2000, 1000)
        for step in range(1, 21):
            tracker.advance(step * 100)
            if tracker.wants(step):
                tracker.step({**METRICS, "loss": 5.0 / step}, step * 100, step)
        tracker.evaluation({"imagenet-zeroshot-val-top1": 0.25, "clip_val_loss": 1.5}, 2000, 20)
        tracker.warning("a warning")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_handler_is_left() -> Iterator[None]:
    before = list(logging.getLogger("shardclip").handlers)
    yield
    assert logging.getLogger("shardclip").handlers == before


def test_plain_lines_have_open_clips_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_a_little(tmp_path, two(), log_every_n_steps=5)
    lines = capsys.readouterr().out.splitlines()
    prefix = r"\d{4}-\d\d-\d\d,\d\d:\d\d:\d\d \| "
    assert all(re.match(prefix, line) for line in lines)
    training = [line for line in lines if "Train Epoch" in line]
    assert len(training) == 5
    assert re.fullmatch(
        prefix + r"INFO \| Train Epoch: 0 \[ 100/1000 \(10%\)\] Data \(t\): 0\.010 Batch \(t\): 0\.100, "
        r"1000\.00/s, 500\.000/s/gpu LR: 0\.000100 Logit Scale: 14\.286 \(ln 2\.659\) "
        r"Contrastive_loss: 2\.5000 \(2\.5000\) Loss: 5\.0000 \(5\.0000\) Grad Norm: 3\.25 Wait: 10% "
        r"MFU: 42\.0% Memory: 3\.00 GiB Slowest: rank 0 on node16 \(\+12%\) ETA: 0:00:02",
        training[0],
    )
    assert "Train Epoch: 1 [1000/1000 (100%)]" in training[-1]
    assert any(
        line.endswith("Eval Epoch: 2 imagenet-zeroshot-val-top1: 0.2500\tclip_val_loss: 1.5000")
        for line in lines
    )
    assert any(line.endswith("| WARNING | a warning") for line in lines)
    assert any(line.endswith("a message [bold]as it is[/bold]") for line in lines)
    assert (tmp_path / "out.log").read_text().splitlines() == lines


def test_files_hold_the_numbers_of_the_run(tmp_path: Path) -> None:
    train_a_little(tmp_path, alone(), log_every_n_steps=7, log_metric_every_n_steps=5)
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 5, 7, 10, 14, 15, 20]
    assert [row["samples_seen"] for row in rows] == [100 * row["step"] for row in rows]
    assert [row["loss"] for row in rows] == [5.0 / row["step"] for row in rows]
    assert rows[0]["logit_scale_log"] == pytest.approx(math.log(14.2857))
    assert set(METRICS) <= set(rows[0])
    (result,) = read(tmp_path / "results.jsonl")
    assert result["clip_val_loss"] == 1.5
    assert (result["epoch"], result["samples_seen"], result["step"]) == (2.0, 2000, 20)


def test_a_number_that_is_not_finite_keeps_the_line_json(tmp_path: Path) -> None:
    with Tracker(TrackingConfig(), tmp_path, alone()) as tracker:
        tracker.begin(1000, 1000)
        tracker.step({"loss": float("nan"), "grad_norm": float("inf")}, 100, 1)
        tracker.step({"loss": 2.0}, 200, 2)
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [None, 2.0]
    assert rows[0]["grad_norm"] is None


def test_a_half_written_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "samples_seen": 100, "lo')
    with Tracker(TrackingConfig(), tmp_path, alone()) as tracker:
        tracker.begin(1000, 1000)
        tracker.step({"loss": 2.0}, 200, 2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1])["loss"] == 2.0


def test_the_loss_in_parentheses_is_an_average_over_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tracker(
        TrackingConfig(log_every_n_steps=1, train_loss_ema_samples=100), tmp_path, alone()
    ) as tracker:
        tracker.begin(1000, 1000)
        for step, loss in enumerate([4.0, 2.0, float("nan"), 2.0], 1):
            tracker.step({"loss": loss}, step * 100, step)
    kept = math.exp(-1)
    second = 4 * kept + 2 * (1 - kept)
    fourth = second * kept + 2 * (1 - kept)
    averages = re.findall(r"Loss: \S+ \((\S+)\)", capsys.readouterr().out)
    assert [float(text) for text in averages] == pytest.approx([4.0, second, second, fourth], rel=1e-4)


def test_b30_the_scale_is_shown_exponentiated_with_its_bound_marked() -> None:
    assert scale_text(14.2857, 100.0) == "14.286 (ln 2.659)"
    assert scale_text(math.exp(4.60517), 100.0) == "100.000 (ln 4.605, at its bound)"
    assert scale_text(100.0, None) == "100.000 (ln 4.605)"
    line = training_line({"logit_scale": 100.0, "logit_scale_bound": 100.0}, {}, Clock(10, 100, 50))
    assert "Logit Scale: 100.000 (ln 4.605, at its bound)" in line


def test_numbers_that_were_not_measured_are_left_out() -> None:
    assert training_line({}, {}, Clock(60, 100, 50)) == "Train Epoch: 1 [10/50 (20%)]"
    assert "ETA: unknown" in training_line({"samples_per_second": 0.0}, {}, Clock(60, 100, 50))


def test_tensorboard_has_open_clips_names(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(TrackingConfig(report_to="tensorboard"), tmp_path, alone()) as tracker:
        tracker.begin(2000, 1000)
        tracker.step(METRICS, 100, 1)
        tracker.evaluation({"clip_val_loss": 1.5}, 100, 1)
        tracker.picture("retrieval", Image.new("RGB", (4, 3), "red"), 100, 1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    open_clips = "data_time batch_time samples_per_second samples_per_second_per_gpu logit_scale lr loss"
    assert {f"train/{name}" for name in [*open_clips.split(), "contrastive_loss"]} <= names
    assert [(point.step, point.value) for point in events.Scalars("val/clip_val_loss")] == [(1, 1.5)]
    assert events.Tags()["images"] == ["retrieval"]
    assert Image.open(tmp_path / "pictures" / "retrieval-100.png").getpixel((0, 0)) == (255, 0, 0)


WANDB = """
import json, os
class util:
    @staticmethod
    def generate_id(): return "abc"
class Image:
    def __init__(self, picture): self.size = picture.size
def _say(what, **values):
    with open(os.environ["CALLS"], "a") as file: file.write(json.dumps([what, values]) + "\\n")
def init(**options): _say("init", **options)
def log(values, step): _say("log", names=sorted(values), step=step)
def finish(): raise OSError("the server is away")
"""


@pytest.mark.parametrize("module", ["wandb", "trackio"])
def test_a_tracker_of_others_is_fed_and_never_stops_a_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{module}.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for _ in range(2):
        config = TrackingConfig(report_to=module, wandb_project_name="p", wandb_notes="n")
        with Tracker(config, tmp_path / "run", alone(), settings={"lr": 1.0}) as tracker:
            tracker.begin(2000, 1000)
            tracker.step({"loss": 1.0}, 100, 1)
    calls = read(tmp_path / "calls")
    assert [call[0] for call in calls] == ["init", "log", "init", "log"]
    assert calls[0][1] == calls[2][1]
    of_wandb = {"notes": "n", "id": "abc"} if module == "wandb" else {}
    settings = {"project": "p", "name": "run", "config": {"lr": 1.0}, "resume": "allow"}
    assert calls[0][1] == settings | of_wandb
    assert calls[1][1] == {"names": ["samples_seen", "step", "train/loss"], "step": 1}
    assert f"{module} failed and may lack numbers" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, module)


def test_a_missing_or_unknown_tracker_is_a_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        TrackingConfig(report_to="wandb")
    with pytest.raises(UserError, match="none of tensorboard, wandb, trackio"):
        TrackingConfig(report_to="tensorbord,wandb")
    with pytest.raises(UserError, match="--log-every-n-steps 0: must be 1 or more"):
        TrackingConfig(log_every_n_steps=0)


def run_on_ranks(folder: str) -> list[str]:
    processes = distributed.current()
    train_a_little(Path(folder), processes)
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def test_rank_0_writes_the_numbers_and_each_rank_its_log(ranks: "Any", tmp_path: Path) -> None:
    pool: RankPool = ranks(2)
    pool.run(run_on_ranks, str(tmp_path))
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["logs/rank-1.log", "metrics.jsonl", "out.log", "results.jsonl"]
    other = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "a warning" in other
    assert "Train Epoch" not in other
    assert len(read(tmp_path / "metrics.jsonl")) == 3


TERMINAL = """
import sys
from pathlib import Path
import torch
from shardclip.training.distributed import Processes
from shardclip.training.tracking import Tracker, TrackingConfig
one = Processes(0, 1, 0, 1, torch.device("cpu"), "single", "here")
with Tracker(TrackingConfig(log_every_n_steps=10), Path(sys.argv[1]), one) as tracker:
    tracker.begin(2000, 1000)
    for step in range(1, 21):
        tracker.advance(step * 100)
        if tracker.wants(step):
            numbers = {"loss": 5 / step, "logit_scale": 14.2857, "grad_norm": 3.25, "samples_per_second": 1e3}
            tracker.step(numbers, step * 100, step)
"""


def test_a_terminal_gets_a_bar_with_rates_and_the_time_left(tmp_path: Path) -> None:
    output = in_a_terminal([sys.executable, "-c", TERMINAL, str(tmp_path)])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    bar = r"epoch 1 ━+ 2000/2000 100% 1,000/s left 0:00:00 \S+ loss 0\.25 scale 14\.29 norm 3\.25"
    assert re.search(bar, text)
    assert len(re.findall(r"Train Epoch: \d", text)) == 3
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") > 0


def in_a_terminal(command: list[str]) -> str:
    """What a program writes to a pseudo-terminal of 160 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "160", "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    pieces = []
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(ours)
    text = b"".join(pieces).decode()
    assert process.wait() == 0, text
    return text
