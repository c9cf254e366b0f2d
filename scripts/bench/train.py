"""Training from the command line: `shardclip train` against `open_clip_train.main`, side by side.

    python scripts/bench/train.py --peer-python /path/to/venv/bin/python --json

The peer is open_clip's trainer as installed in the interpreter of --peer-python (3.3.0 needs webdataset
<= 0.2.86 and pandas), by its own command line. Both get the same shards (512x384 JPEG; captions of 18 tokens
in the mean, log-normal, 3 % over the limit), model, batch, precision (fp32), workers, seed and one thread a
process, in turns. Both log every step; the time of a step is that between their lines, the first ones apart.

`decode_limited` is a model so small that it waits for pictures; `model_limited` is a ViT-B/32 of fewer and
narrower layers that hardly waits, a step of each trainer in turns. `of_bare_towers` is the latter over
its towers alone (bare_towers.py), in the same way. `time_to_first_step` is from the command to the end of
the first step, with the small model; its parts are until the model stands (imports are most of it), until the
loop begins, and the first step with the start of the workers. Two processes share the global batch and the
two cores of one process with two threads; memory is the peak of the largest process of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from report import Row, compared, in_turns, parser, show
from shards import caption, caption_words, photograph, write_shard

CONTEXT, SIDE, SHARDS = 77, 224, 4
STEP_LINE = re.compile(r"Train Epoch: .* Batch \(t\): .* Loss: ([\d.]+) ")
PHASES = ("model", "setup", "first_step")
"""Of the start."""
OUR_PHASE_LINES = (re.compile(r"\| model +[\d.]+ s$"), re.compile(r"\| resume +[\d.]+ s$"), STEP_LINE)
"""What is printed at the end of each."""
PEER_PHASE_LINES = (re.compile(r"\| Model:$"), re.compile(r"\| Start epoch 0$"), STEP_LINE)


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    name: str
    width: int
    image_layers: int
    text_layers: int
    batch: int
    workers: int
    warmup: int
    """Steps that do not count."""
    steps: int
    """Steps that do."""

    @property
    def model_cfg(self) -> dict[str, object]:
        """open_clip's configuration of a ViT at patch 32 and a text tower of the same width."""
        vision = {"image_size": SIDE, "layers": self.image_layers, "patch_size": 32, "head_width": 64}
        text = {"context_length": CONTEXT, "vocab_size": 49408, "layers": self.text_layers}
        return {
            "embed_dim": self.width,
            "vision_cfg": {**vision, "width": self.width},
            "text_cfg": {**text, "width": self.width, "heads": self.width // 64},
        }


@dataclass(frozen=True)
class Seen:
    """What one run showed from outside."""

    first_step: float
    """Seconds from the command to the end of the first step."""
    step: float
    """Seconds of a step in the steady state, mean."""
    losses: list[float]
    """Of every step."""
    phases: dict[str, float]
    """Seconds of the phases of the start."""
    memory: int
    """Peak resident bytes of the largest of its processes."""


def cases(quick: bool) -> tuple[Case, Case]:
    """The one that decoding limits and the one that the model limits."""
    if quick:
        return (
            Case("decode_limited", 64, 1, 1, batch=32, workers=1, warmup=6, steps=4),
            Case("model_limited", 192, 4, 3, batch=16, workers=1, warmup=2, steps=3),
        )
    return (
        Case("decode_limited", 64, 1, 1, batch=64, workers=1, warmup=8, steps=12),
        Case("model_limited", 192, 6, 4, batch=32, workers=1, warmup=2, steps=8),
    )


def make_data(folder: Path, quick: bool) -> None:
    """Shards with 512x384 pictures, and for each case a folder with the model's configuration."""
    chance = np.random.default_rng(0)
    pictures = [photograph((384, 512), chance) for _ in range(8 if quick else 32)]
    for shard in range(SHARDS):
        words = caption_words(64 if quick else 256, chance)
        write_shard(folder / f"{shard:05d}.tar", pictures, [caption(number, chance) for number in words])
    for case in cases(quick):
        (folder / case.name).mkdir()
        config = {"model_cfg": case.model_cfg, "preprocess_cfg": {"size": SIDE}}
        (folder / case.name / "open_clip_config.json").write_text(json.dumps(config))


def data_of(folder: Path) -> str:
    """The shards, in the form of --train-data."""
    return f"{folder}/{{00000..{SHARDS - 1:05d}}}.tar"


def common_flags(folder: Path, case: Case, processes: int = 1) -> list[str]:
    """Flags that both trainers know."""
    flags = {
        "model": f"local-dir:{folder / case.name}",
        "train-data": data_of(folder),
        "train-num-samples": processes * case.batch * (case.warmup + case.steps),
        "dataset-type": "webdataset",
        "batch-size": case.batch,
        "workers": case.workers,
        "precision": "fp32",
        "device": "cpu",
        "epochs": 1,
        "warmup": 2,
        "lr": 5e-4,
        "seed": 0,
        "save-frequency": 0,
        "log-every-n-steps": 1,
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def our_command(folder: Path, case: Case, runs: str | Path, processes: int = 1) -> list[str]:
    """`shardclip train` with a folder for its runs."""
    command = [sys.executable, "-m", "shardclip", "train", *common_flags(folder, case, processes)]
    return [*command, "--output-dir", str(runs), "--name", "run"]


def ours(folder: Path, case: Case, *more: str, processes: int = 1, threads: int = 1) -> Seen:
    """One run of `shardclip train`."""
    if processes > 1:
        more = (*more, "--nproc", str(processes))
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        command = [*our_command(folder, case, runs, processes), *more]
        return watched(command, case, threads, OUR_PHASE_LINES)


def peer_command(folder: Path, case: Case, python: str, runs: str | Path) -> list[str]:
    """`open_clip_train.main` with a folder for its runs."""
    flags = [*common_flags(folder, case), "--logs", str(runs), "--name", "run"]
    return [python, "-m", "open_clip_train.main", *flags]


def peer(folder: Path, case: Case, python: str) -> Seen:
    """One run of `open_clip_train.main`."""
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        return watched(peer_command(folder, case, python, runs), case, 1, PEER_PHASE_LINES)


def started(command: list[str], threads: int, alone: bool = False) -> subprocess.Popen[str]:
    """A command whose lines are read as they come; `alone`: it and its children are a group of their own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env=environment, start_new_session=alone, **output)


def watched(command: list[str], case: Case, threads: int, phase_lines: tuple[re.Pattern[str], ...]) -> Seen:
    """Run a trainer to its end and note when each line of a step, or at the end of a phase, appears.

    Raises:
        RuntimeError: it failed, or did not log the steps that were asked for.
    """
    began = time.perf_counter()
    process = started(command, threads)
    assert process.stdout is not None
    lines, steps, losses, moments = [], [], [], [0.0]
    for line in process.stdout:
        lines.append(line.rstrip())
        now = time.perf_counter() - began
        if len(moments) <= len(phase_lines) and phase_lines[len(moments) - 1].search(lines[-1]):
            moments.append(now)
        if found := STEP_LINE.search(line):
            steps.append(now)
            losses.append(float(found[1]))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or len(steps) != case.warmup + case.steps:
        raise RuntimeError(f"{' '.join(command[1:4])}: {len(steps)} steps, then: " + " | ".join(lines[-3:]))
    phases = dict(zip(PHASES, (end - start for start, end in pairwise(moments)), strict=True))
    seconds = (steps[-1] - steps[case.warmup - 1]) / case.steps
    seen = Seen(steps[0], seconds, losses, phases, 1024 * usage.ru_maxrss)
    told = f"{case.name}, {command[2]}: {seen.step:.3f} s a step, the first after {seen.first_step:.1f} s"
    print(told, file=sys.stderr, flush=True)
    return seen


class Paced:
    """A process that prints a line after each step, and stands still after its first ones except while it is
    asked for another."""

    def __init__(self, command: list[str], line: re.Pattern[str], warmup: int) -> None:
        self._command, self._line, self._warmup = command, line, warmup

    def __enter__(self) -> Paced:
        self._process = started(self._command, threads=1, alone=True)
        for _ in range(self._warmup):
            self.step()
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def step(self) -> float:
        """Seconds of the next step.

        Raises:
            RuntimeError: the process ended before.
        """
        assert self._process.stdout is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        began, line = time.perf_counter(), "nothing"
        while not self._line.search(line):
            said, line = line, self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"{' '.join(self._command[1:4])} ended too soon: {said.strip()}")
        seconds = time.perf_counter() - began
        os.killpg(self._process.pid, signal.SIGSTOP)
        return seconds


def figures(case: Case, run: Seen) -> dict[str, float]:
    """Those of one run, by row."""
    phases = {f"start_{name}": seconds for name, seconds in run.phases.items()}
    return {case.name: case.batch / run.step, "time_to_first_step": run.first_step, **phases}


def starting_and_decoding(folder: Path, chosen: argparse.Namespace) -> list[Row]:
    """The case that decoding limits, and the time to the first step: whole runs in turns."""
    case, _ = cases(chosen.quick)
    rows = [
        Row(case.name, "samples/s", "higher", 2.0),
        Row("time_to_first_step", "s", reach=1.0),
        *(Row(f"start_{name}", "s") for name in PHASES),
    ]
    try:
        runs = in_turns(
            partial(ours, folder, case),
            partial(peer, folder, case, chosen.peer_python),
            repeats=chosen.repeats,
        )
    except RuntimeError as error:
        return [replace(row, reason=f"a trainer failed: {error}") for row in rows]
    found = []
    for row in rows:
        sides = ([figures(case, run)[row.name] for run in side] for side in runs)
        found.append(compared(row.name, row.unit, *sides, better=row.better, reach=row.reach))
    return found


def model_limited(folder: Path, chosen: argparse.Namespace) -> list[Row]:
    """The case that the model limits, against the peer and against the bare towers on the same tokens: a step
    of each in turns, as the pace of a shared machine differs more from one second to the next than the two
    sides may do."""
    _, case = cases(chosen.quick)
    turns = 12 * chosen.repeats
    steps = case.warmup + turns
    # One more than are measured: a line comes when the step after it has begun.
    longer = replace(case, warmup=0, steps=steps + 1)
    towers = [sys.executable, str(Path(__file__).with_name("bare_towers.py")), str(folder)]
    towers += ["--steps", str(steps), *["--quick"] * chosen.quick]
    others = {
        case.name: (peer_command(folder, longer, chosen.peer_python, folder / "peer"), STEP_LINE, 1.5),
        "of_bare_towers": (towers, re.compile("^step$"), 0.95),
    }
    rows = []
    for name, (command, line, reach) in others.items():
        whole = our_command(folder, longer, folder / f"runs-{name}")
        try:
            with Paced(whole, STEP_LINE, case.warmup) as trainer, Paced(command, line, case.warmup) as other:
                seconds = in_turns(trainer.step, other.step, repeats=turns)
        except RuntimeError as error:
            rows.append(Row(name, "samples/s", "higher", reach, reason=str(error)))
            continue
        rates = ([case.batch / step for step in side] for side in seconds)
        rows.append(compared(name, "samples/s", *rates, better="higher", reach=reach))
    return rows


def two_processes(folder: Path, chosen: argparse.Namespace) -> list[Row]:
    """Step times of two processes at the global batch of one; their losses must be the same."""
    _, whole = cases(chosen.quick)
    half = replace(whole, batch=whole.batch // 2)
    runs: dict[str, list[Seen]] = {"single": [], "ddp": [], "fsdp": []}
    try:
        for _ in range(chosen.repeats):
            runs["single"].append(ours(folder, whole, threads=2))
            for engine in ("ddp", "fsdp"):
                runs[engine].append(ours(folder, half, f"--{engine}", processes=2))
        for engine in ("ddp", "fsdp"):
            pairs = list(zip(runs[engine][0].losses, runs["single"][0].losses, strict=True))
            # Lines have five digits.
            if any(abs(one - other) > 1e-4 * other for one, other in pairs):
                raise RuntimeError(f"losses of {engine} on two processes are not those of one: {pairs}")
    except RuntimeError as error:
        return [
            Row(f"{name}{what}", unit, reason=str(error))
            for what, unit in (("", "s"), ("_memory", "MB"))
            for name in ("ddp_over_single", "fsdp_over_ddp")
        ]
    seconds = {name: [run.step for run in found] for name, found in runs.items()}
    memory = {name: [run.memory / 1e6 for run in found] for name, found in runs.items()}
    return [
        compared("ddp_over_single", "s", seconds["ddp"], seconds["single"]),
        compared("fsdp_over_ddp", "s", seconds["fsdp"], seconds["ddp"]),
        compared("ddp_over_single_memory", "MB", memory["ddp"], memory["single"]),
        compared("fsdp_over_ddp_memory", "MB", memory["fsdp"], memory["ddp"]),
    ]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__, repeats=3)
    options.add_argument("--peer-python", default=sys.executable, help="interpreter with the peer installed")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-train-") as name:
        folder = Path(name)
        make_data(folder, chosen.quick)
        rows = [
            *starting_and_decoding(folder, chosen),
            *model_limited(folder, chosen),
            *two_processes(folder, chosen),
        ]
    show(
        "train",
        rows,
        repeats=chosen.repeats,
        packages=("torch", "open_clip_torch", "shardclip"),
        as_json=chosen.json,
        cases=[asdict(case) for case in cases(chosen.quick)],
    )


if __name__ == "__main__":
    main()
