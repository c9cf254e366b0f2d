"""The one form of all benchmarks: a table for people, and with --json one JSON object as the last line.

    {"bench": "loss", "machine": "...", "versions": {...}, "command": "...", "repeats": 5,
     "rows": [{"name": "time_ratio", "ours": 1.9, "peer": 2.4, "unit": "s", "ratio": 0.79,
               "spread": [0.75, 0.83], "better": "lower", "reach": 1.0}]}

`ratio` is ours over the peer's, the median over pairs of measurements taken in turns in one run; `spread` is
its smallest and largest. What cannot be measured is a row of nulls with a `reason`, never left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

# The processes of a measurement are forked from a server that has these: a start costs nothing.
multiprocessing.set_forkserver_preload(["torch", "open_clip", "shardclip.training.loop"])


Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Row:
    """One comparison."""

    name: str
    unit: str
    better: Literal["lower", "higher"] = "lower"
    reach: float | None = None
    """The ratio to reach; None where it is only stated."""
    ours: float | None = None
    """Median of our measurements."""
    peer: float | None = None
    """Median of the peer's."""
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    reason: str | None = None
    """Why there is no figure."""


def in_turns(
    ours: Callable[[], Measured], peer: Callable[[], Measured], repeats: int
) -> tuple[list[Measured], list[Measured]]:
    """Measure both `repeats` times, one after the other, and the other one first every second time."""
    found: tuple[list[Measured], list[Measured]] = ([], [])
    for turn in range(repeats):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which].append((ours, peer)[which]())
    return found


def compared(
    name: str,
    unit: str,
    ours: list[float],
    peer: list[float],
    *,
    better: Literal["lower", "higher"] = "lower",
    reach: float | None = None,
) -> Row:
    """The row of measurements that were taken in pairs."""
    ratios = [mine / other for mine, other in zip(ours, peer, strict=True)]
    return Row(
        name, unit, better, reach, median(ours), median(peer), median(ratios), (min(ratios), max(ratios))
    )


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a new process (for figures that belong to a process, such as peak memory)."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, *args).result()


def in_ranks(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """`function(rank, *args)` in as many new processes; an exception in one ends all and is raised here."""
    # An import that not every benchmark can afford: train.py's own process should stay small.
    from torch.multiprocessing import start_processes

    start_processes(function, args, nprocs=ranks, start_method="forkserver")


def parser(description: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="one JSON object as the last line")
    made.add_argument("--quick", action="store_true", help="smaller sizes, the same comparisons")
    made.add_argument("--repeats", type=int, default=repeats, help="pairs of measurements (%(default)s)")
    return made


def show(
    bench: str, rows: list[Row], *, repeats: int, packages: tuple[str, ...], as_json: bool, **settings: Any
) -> None:
    """Print the table and, if asked for, the JSON object; `settings` are further entries of it."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    report = {
        "bench": bench,
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "command": shlex.join(["python", *sys.argv]),
        "repeats": repeats,
        **settings,
        "rows": [asdict(row) for row in rows],
    }
    table = Table("row", "ours", "peer", "unit", "ratio", "spread", "to reach", title=bench)
    for row in rows:
        goal = "" if row.reach is None else f"{'<=' if row.better == 'lower' else '>='} {row.reach:g}"
        figures = [row.reason or "no figure", "", row.unit, "null", ""]
        if row.ratio is not None and row.spread is not None:
            spread = f"{row.spread[0]:.3g} .. {row.spread[1]:.3g}"
            figures = [f"{row.ours:.4g}", f"{row.peer:.4g}", row.unit, f"{row.ratio:.3g}", spread]
        table.add_row(row.name, *figures, goal)
    console.print(table)
    about = {name: value for name, value in report.items() if name not in ("bench", "rows")}
    console.print("  ".join(f"{name}: {value}" for name, value in about.items()), highlight=False)
    if as_json:
        print(json.dumps(report), flush=True)


def machine() -> str:
    """Processor, cores that may be used, memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{models[0] if models else platform.machine()}, {cores} cores, {memory:.0f} GiB"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
