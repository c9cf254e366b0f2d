"""Curves of one or more runs, from what the runs left in their folders.

shardclip plot runs/a runs/b --out curves.png
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shardclip.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    found = {run_label(run, runs): read_run(run) for run in runs}
    figure = new_figure(out, width=13, height=7)
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        _draw(axes, panel, found)
    save_figure(figure, out)


def new_figure(out: Path, *, width: float, height: float) -> "Figure":
    """An empty figure of so many inches that can be saved as `out`.

    Raises:
        UserError: matplotlib is not installed, or the ending of `out` is unknown.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plotting needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    if out.suffix.lstrip(".") not in FigureCanvasAgg(figure).get_supported_filetypes():
        raise UserError(f"{out}: the name must end in .png, .svg or .pdf")
    return figure


def save_figure(figure: "Figure", out: Path) -> None:
    """Write a figure, its folder too if need be."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def run_label(run: Path, runs: Sequence[Path]) -> str:
    """What to call a run: the name of its folder, or the path where names are the same."""
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


def main(argv: Sequence[str]) -> int:
    """`shardclip plot RUN... --out FILE`."""
    command = tyro.cli(PlotCommand, args=argv, prog="shardclip plot")
    if not command.runs:
        raise UserError("shardclip plot: name the folder of at least one run")
    plot(command.runs, command.out)
    print(command.out)
    return 0
