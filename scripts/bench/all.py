"""All benchmarks in one run, into one page: what `make bench` does.

    python scripts/bench/all.py --peer-python .peer/python --out docs/benchmarks [--quick] [--repeats N]

Writes DATE.md and DATE.json: machine, versions, commands, medians and spreads, whatever came out. They are
written anew after each benchmark, so that a run that is stopped leaves what it measured; what the same day
has of others stays. With --quick, which is to see that all of it works, two benchmarks run at a time and
disturb each other's figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NOT_BENCHMARKS = ("all", "report", "shards", "bare_towers")
LONGEST = ("train", "loader", "fsdp_memory")
"""Those that are begun first, so that of two at a time none is left running alone for long."""
WITH_PEER = ("loader", "train")
"""Those whose peer is open_clip's trainer, which wants an older webdataset than we do."""
WITH_PLOT = ("growth",)
"""Those that draw what they measured."""


def names() -> list[str]:
    """The benchmarks, the longest first."""
    rest = {path.stem for path in HERE.glob("*.py")} - {*NOT_BENCHMARKS, *LONGEST}
    return [*LONGEST, *sorted(rest)]


def run(script: Path, options: argparse.Namespace, plot: Path) -> dict[str, Any]:
    """What a benchmark reports, with its minutes; or its name and why there is no report."""
    words = [os.path.relpath(script), "--json"]
    words += ["--quick"] * options.quick
    words += ["--repeats", str(options.repeats)] if options.repeats else []
    words += ["--peer-python", options.peer_python] if script.stem in WITH_PEER else []
    words += ["--plot", str(plot)] if script.stem in WITH_PLOT else []
    print(shlex.join(["python", *words]), flush=True)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=False)
    minutes = round((time.perf_counter() - began) / 60, 1)
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        return {
            "bench": script.stem,
            "failed": f"exit code {done.returncode}",
            "minutes": minutes,
            "rows": [],
        }
    print("\n".join(lines[:-1]), flush=True)
    drawn = {"plot": plot.name} if plot.exists() and script.stem in WITH_PLOT else {}
    return {**json.loads(lines[-1]), "minutes": minutes, **drawn}


def page(reports: list[dict[str, Any]], day: str) -> str:
    """The reports as Markdown, a table each."""
    machine = next((report["machine"] for report in reports if "machine" in report), "an unknown machine")
    lines = [f"# Benchmarks of {day}", "", f"{machine}. Ratios are ours over the peer's: median, and spread."]
    for report in reports:
        lines += ["", f"## {report['bench']}", ""]
        if "failed" in report:
            lines += [f"No figures: {report['failed']}."]
            continue
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        lines += [
            f"`{report['command']}`: {report['repeats']} pairs, {report['minutes']} minutes; {versions}",
            "",
            "| row | ours | peer | unit | ratio | spread | to reach |",
            "|---|---|---|---|---|---|---|",
            *(_line(row) for row in report["rows"]),
        ]
        if "plot" in report:
            lines += ["", f"![{report['bench']}]({report['plot']})"]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    wanted = "" if row["reach"] is None else f"{'<=' if row['better'] == 'lower' else '>='} {row['reach']:g}"
    if row["ratio"] is None:
        return f"| `{row['name']}` | {row['reason']} | | {row['unit']} | null | | {wanted} |"
    low, high = row["spread"]
    figures = f"{row['ours']:.4g} | {row['peer']:.4g} | {row['unit']} | {row['ratio']:.3g}"
    return f"| `{row['name']}` | {figures} | {low:.3g} to {high:.3g} | {wanted} |"


def main() -> int:
    """Measure and write; the exit code is 1 if a benchmark did not come to its end."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="smaller sizes, the same comparisons")
    options.add_argument("--repeats", type=int, help="pairs of measurements; default: each script's own")
    options.add_argument("--peer-python", default=sys.executable, help="interpreter with the peer installed")
    options.add_argument("--only", nargs="+", choices=names(), default=names(), help="these, in this order")
    options.add_argument("--out", type=Path, required=True, help="folder of the page")
    chosen = options.parse_args()
    day = date.today().isoformat()
    chosen.out.mkdir(parents=True, exist_ok=True)
    written = chosen.out / f"{day}.json"
    kept = {report["bench"]: report for report in json.loads(written.read_text())} if written.exists() else {}
    pool = ThreadPoolExecutor(2 if chosen.quick else 1)
    for done in as_completed(
        pool.submit(run, HERE / f"{name}.py", chosen, chosen.out / f"{day}-{name}.png")
        for name in chosen.only
    ):
        kept[done.result()["bench"]] = done.result()
        reports = [kept[name] for name in names() if name in kept]
        (chosen.out / f"{day}.md").write_text(page(reports, day), encoding="utf-8")
        written.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    print(f"written: {chosen.out / day}.md and .json")
    return int(any("failed" in kept[name] for name in chosen.only))


if __name__ == "__main__":
    sys.exit(main())
