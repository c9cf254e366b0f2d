"""Curves of one or more runs, and a table of their results, from what the runs left in their folders.

shardclip plot runs/a runs/b --out curves.png
shardclip compare runs/a runs/b
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shardclip.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One small plot: which numbers over samples seen."""

    title: str
    names: tuple[str, ...]
    """Names in metrics.jsonl or results.jsonl; `*X` means every name that ends in X."""
    logarithmic: bool = False


PANELS = (
    Panel("loss", ("*loss",)),
    Panel("accuracy and recall", ("*top1", "*acc1", "*accuracy", "*R@1", "*R@5")),
    Panel("samples per second", ("samples_per_second",)),
    Panel("logit scale", ("logit_scale", "logit_scale_bound")),
    Panel("gradient norm", ("grad_norm",), logarithmic=True),
    Panel("learning rate", ("lr",)),
)


def read_lines(path: Path) -> list[Row]:
    """The lines of a metrics.jsonl or results.jsonl, in order of `samples_seen`.

    A resumed run steps back and writes anew what it had written beyond its checkpoint: lines that reach
    beyond the place where it took up are dropped. So is a line that a kill left half written.
    """
    rows: list[Row] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        while rows and rows[-1].get("samples_seen", 0) > row.get("samples_seen", 0):
            rows.pop()
        rows.append(row)
    return rows


def read_run(run: Path) -> tuple[list[Row], list[Row]]:
    """What a run wrote while training, and at its evaluations.

    Raises:
        UserError: the folder holds neither.
    """
    training, results = read_lines(run / "metrics.jsonl"), read_lines(run / "results.jsonl")
    if not training and not results:
        raise UserError(f"{run}: holds no metrics.jsonl and no results.jsonl, so it is no run's folder")
    return training, results


def series(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Samples seen, and the values of one number where it was written and finite."""
    points = [(row["samples_seen"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    return [float(x) for x, _ in points], [float(y) for _, y in points]


def plot(runs: Sequence[Path], out: Path) -> None:
    """Draw loss, accuracy, throughput, scale, norm and learning rate of the runs over samples seen.

    Args:
        runs: folders of runs.
        out: file to write; its ending chooses the format (.png, .svg, .pdf).

    Raises:
        UserError: matplotlib is not installed, a folder is not a run's, or the ending is unknown.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plotting needs matplotlib: pip install matplotlib") from None
    found = {_label(run, runs): read_run(run) for run in runs}
    figure = Figure(figsize=(13, 7), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if out.suffix.lstrip(".") not in canvas.get_supported_filetypes():
        raise UserError(f"{out}: the name must end in .png, .svg or .pdf")
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        _draw(axes, panel, found)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def _label(run: Path, runs: Sequence[Path]) -> str:
    names = [other.resolve().name for other in runs]
    return run.resolve().name if names.count(run.resolve().name) == 1 else str(run)


def _draw(axes: "Axes", panel: Panel, runs: dict[str, tuple[list[Row], list[Row]]]) -> None:
    """All lines of one panel; those of results carry a mark at each evaluation."""
    for number, (label, (training, results)) in enumerate(runs.items()):
        for rows, style in ((training, "-"), (results, "o--")):
            for place, name in enumerate(_matching(rows, panel)):
                seen, values = series(rows, name)
                text = name if len(runs) == 1 else f"{label}: {name}"
                color = f"C{place if len(runs) == 1 else number}"
                opacity = 1.0 if len(runs) == 1 else max(0.3, 1 - 0.25 * place)
                axes.plot(
                    seen, values, style, label=text, color=color, alpha=opacity, linewidth=1.2, markersize=3
                )
    axes.set_title(panel.title)
    axes.set_xlabel("samples seen")
    axes.grid(alpha=0.3)
    if panel.logarithmic:
        axes.set_yscale("log", nonpositive="mask")
    if axes.lines:
        axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)


def _matching(rows: Sequence[Row], panel: Panel) -> list[str]:
    known = dict.fromkeys(name for row in rows for name in row)
    return [
        name
        for name in known
        if any(name.endswith(p[1:]) if p.startswith("*") else name == p for p in panel.names)
        and series(rows, name)[0]
    ]


@dataclass(frozen=True)
class PlotCommand:
    """Draw loss, accuracy, throughput, scale and norms of runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: Path = Path("curves.png")
    """File to write: .png, .svg or .pdf."""


@dataclass(frozen=True)
class CompareCommand:
    """Print the last results of runs side by side."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    metrics: tuple[str, ...] = field(default=())
    """Names to show; default: all that any of the runs has."""


def main(argv: Sequence[str]) -> int:
    """`shardclip plot RUN... --out FILE`."""
    command = tyro.cli(PlotCommand, args=argv, prog="shardclip plot")
    if not command.runs:
        raise UserError("shardclip plot: name the folder of at least one run")
    plot(command.runs, command.out)
    print(command.out)
    return 0


def compare(argv: Sequence[str]) -> int:
    """`shardclip compare RUN...`."""
    from rich.console import Console
    from rich.table import Table

    command = tyro.cli(CompareCommand, args=argv, prog="shardclip compare")
    if not command.runs:
        raise UserError("shardclip compare: name the folders of runs")
    last = {run: last_results(run) for run in command.runs}
    names = command.metrics or tuple(dict.fromkeys(name for row in last.values() for name in row))
    table = Table("", *(_label(run, command.runs) for run in command.runs))
    for name in names:
        table.add_row(name, *(_cell(row.get(name)) for row in last.values()))
    Console(width=None if len(command.runs) < 4 else 60 + 24 * len(command.runs)).print(table)
    return 0


def last_results(run: Path) -> Row:
    """The newest value of each result of a run, and the newest training loss."""
    training, results = read_run(run)
    merged: Row = {}
    if training:
        merged |= {name: training[-1][name] for name in ("samples_seen", "loss") if name in training[-1]}
    for row in results:
        merged |= {name: value for name, value in row.items() if name not in ("time", "step")}
    return merged


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
