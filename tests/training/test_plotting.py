"""Curves and tables: the numbers of metrics.jsonl and results.jsonl, and nothing that a resume took back."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardclip.errors import UserError
from shardclip.training import comparison, plotting


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def a_run(folder: Path, start: float = 5.0) -> Path:
    training = [
        {
            "samples_seen": 100 * step,
            "loss": start / step,
            "samples_per_second": 1000.0,
            "logit_scale": 14.0 + step,
            "grad_norm": 1.0 / step,
            "lr": 1e-4,
        }
        for step in range(1, 11)
    ]
    write(folder / "metrics.jsonl", training)
    results = [{"samples_seen": seen, "imagenet-zeroshot-val-top1": seen / 4000} for seen in (500, 1000)]
    write(folder / "results.jsonl", results)
    return folder


def test_what_a_resume_took_back_is_not_drawn(tmp_path: Path) -> None:
    seen = [100, 200, 300, 400, 250, 350]
    write(tmp_path / "metrics.jsonl", [{"samples_seen": s, "loss": float(i)} for i, s in enumerate(seen)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"samples_seen": 450, "lo')
    rows = plotting.read_lines(tmp_path / "metrics.jsonl")
    assert [row["samples_seen"] for row in rows] == [100, 200, 250, 350]
    assert plotting.series(rows, "loss") == ([100.0, 200.0, 250.0, 350.0], [0.0, 1.0, 4.0, 5.0])


def test_numbers_that_were_not_finite_are_gaps() -> None:
    rows = [{"samples_seen": 1, "loss": None}, {"samples_seen": 2, "loss": 2.0}, {"samples_seen": 3}]
    assert plotting.series(rows, "loss") == ([2.0], [2.0])


def test_a_picture_holds_the_numbers_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: dict[str, list[float]] = {}
    draw = Axes.plot

    def note(
        axes: Axes, seen: list[float], values: list[float], *style: str, label: str, **more: object
    ) -> list:
        drawn[label] = values
        return draw(axes, seen, values, *style, label=label, **more)

    monkeypatch.setattr(Axes, "plot", note)
    plotting.plot([a_run(tmp_path / "run")], tmp_path / "curves.png")
    assert drawn["loss"] == [5.0 / step for step in range(1, 11)]
    assert drawn["imagenet-zeroshot-val-top1"] == [0.125, 0.25]
    assert {"logit_scale", "grad_norm", "samples_per_second", "lr"} <= set(drawn)
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size[0] > 1000
        assert len(picture.convert("RGB").getcolors(2**24)) > 50


def test_several_runs_stand_in_one_picture_by_name(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "one"), a_run(tmp_path / "two", start=7.0)]
    plotting.plot(runs, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert all(re.search(rf"<!-- {name}: loss -->", text) for name in ("one", "two"))
    assert "<!-- not measured -->" not in text


def test_what_cannot_be_drawn_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run's folder"):
        plotting.plot([tmp_path], tmp_path / "curves.png")
    with pytest.raises(UserError, match=r"must end in \.png"):
        plotting.plot([a_run(tmp_path / "run")], tmp_path / "curves.bmp")


def test_runs_are_compared_by_their_last_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(a_run(tmp_path / "one")), str(a_run(tmp_path / "two", start=7.0))]
    assert comparison.main([*runs, "--out", str(tmp_path / "bars.svg")]) == 0
    cells = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert re.findall(r"\d\.\d+", cells["loss"]) == ["0.5000", "0.7000"]
    assert re.findall(r"\d\.\d+", cells["imagenet-zeroshot-val-top1"]) == ["0.2500", "0.2500"]
    text = (tmp_path / "bars.svg").read_text()
    assert all(f"<!-- {shown} -->" in text for shown in ("one", "two", "0.700", "imagenet-zeroshot-val-top1"))


def test_files_of_results_are_compared_by_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, accuracy in (("a", 0.5), ("b", 0.75)):
        files.append(str(tmp_path / f"{name}.jsonl"))
        write(Path(files[-1]), [{"dataset": "cifar10", "metrics": {"acc1": accuracy, "acc5": 1.0}}])
    assert comparison.main([*files, "--metrics", "acc1", "--out", str(tmp_path / "bars.png")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"cifar10 acc1\s*│ 0\.5000\s*│ 0\.7500", said)
    assert "acc5" not in said
    with Image.open(tmp_path / "bars.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**24)) > 20
    with pytest.raises(UserError, match="the runs have cifar10 acc1, cifar10 acc5"):
        comparison.main([*files, "--metrics", "recall"])
    write(tmp_path / "c.jsonl", [{"loss": 1.0}])
    with pytest.raises(UserError, match="line 1: not a result"):
        comparison.main([str(tmp_path / "c.jsonl")])
