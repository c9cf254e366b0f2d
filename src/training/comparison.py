"""The results of runs side by side: a table, and bars.

shardclip compare runs/a runs/b
shardclip compare a.jsonl b.jsonl --metrics acc1 --out compare.png
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from shardclip.errors import UserError
from shardclip.training.plotting import Row, new_figure, read_run, run_label, save_figure


@dataclass(frozen=True)
class CompareCommand:
    """Print the last results of runs side by side, and draw them."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or files that `shardclip eval --results` wrote."""
    metrics: tuple[str, ...] = ()
    """Names, or parts of names, to show; default: all that any of the runs has."""
    out: Path | None = None
    """Also draw the shares among them (accuracies, recalls) as bars: .png, .svg or .pdf."""


def main(argv: Sequence[str]) -> int:
    """`shardclip compare RUN...`.

    Raises:
        UserError: no run is named, one has no results, or no result has a name that was asked for.
    """
    command = tyro.cli(CompareCommand, args=argv, prog="shardclip compare")
    if not command.runs:
        raise UserError("shardclip compare: name the folders of runs")
    last = {run_label(run, command.runs): last_results(run) for run in command.runs}
    known = list(dict.fromkeys(name for row in last.values() for name in row))
    names = [name for name in known if not command.metrics or any(part in name for part in command.metrics)]
    if not names:
        raise UserError(f"--metrics {' '.join(command.metrics)}: the runs have {', '.join(known)}")
    table = Table("", *last)
    for name in names:
        table.add_row(name, *(_cell(row.get(name)) for row in last.values()))
    Console(width=None if len(last) < 4 else 60 + 24 * len(last)).print(table)
    if command.out is not None:
        draw(last, names, command.out)
        print(command.out)
    return 0


def last_results(run: Path) -> Row:
    """The newest value of each result of a run, and its newest training loss.

    Args:
        run: the run's folder, or a file of results in CLIP_benchmark's form, whose names get the data set's
            before them.

    Raises:
        UserError: there are no results.
    """
    if run.is_file():
        return _from_file(run)
    training, results = read_run(run)
    merged: Row = {}
    if training:
        merged |= {name: training[-1][name] for name in ("samples_seen", "loss") if name in training[-1]}
    for row in results:
        merged |= {name: value for name, value in row.items() if name not in ("time", "step")}
    return merged


def _from_file(path: Path) -> Row:
    merged: Row = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            result = json.loads(line)
            merged |= {f"{result['dataset']} {name}": value for name, value in result["metrics"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}, line {number}: not a result of `shardclip eval --results`") from None
    return merged


def draw(last: Mapping[str, Row], names: Sequence[str], out: Path) -> None:
    """Bars of every number between 0 and 1, those of one name side by side.

    Args:
        last: results by run.
        names: which of them.
        out: file to write; its ending chooses the format.

    Raises:
        UserError: there is nothing to draw, or the file's ending is unknown.
    """
    shares = [name for name in names if any(_is_share(row.get(name)) for row in last.values())]
    if not shares:
        raise UserError(f"{out}: none of the results is a share between 0 and 1 ({', '.join(names)})")
    figure = new_figure(out, width=9, height=1 + 0.3 * len(shares) * (1 + 0.5 * len(last)))
    axes = figure.subplots()
    height = 0.8 / len(last)
    for number, (label, row) in enumerate(last.items()):
        places = [place + number * height for place in range(len(shares))]
        values = [row[name] if _is_share(row.get(name)) else 0.0 for name in shares]
        bars = axes.barh(places, values, height=height, label=label)
        axes.bar_label(bars, [f"{value:.3f}" for value in values], padding=2, fontsize=7)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(shares))], shares, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.legend(fontsize=7)
    save_figure(figure, out)


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value <= 1


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
