"""Nothing is lost: runs killed, told to stop or broken; saves that are killed, full disks, damage."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from disturbed import disturbed
from launched import HANG_SECONDS, Launched, torchrun_environments
from torch.distributed.checkpoint import filesystem
from train_states import different, load_latest, open_checkpoints, resumed, save, state_of, step, whole

from commands import GLOBAL_BATCH, STEPS, Finished, eight_steps, losses, rows
from shardclip.errors import UserError
from shardclip.training.checkpoint import checkpoints as checkpoints_module
from shardclip.training.checkpoint import folders, published, samples_of, storage
from shardclip.training.checkpoint.storage import fault
from shardclip.training.failure import EXIT_FAILURE, EXIT_REQUEUE

# -- runs


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody disturbs, on two ranks."""
    folder = tmp_path_factory.mktemp("calm")
    finished = Finished(folder, eight_steps(folder, "run", 2))
    assert finished.codes == [0, 0], finished.said
    return folder


class Struck:
    """A run on two ranks in which something happens to rank 1; what is left when it has ended."""

    def __init__(
        self,
        folder: Path,
        what: str,
        phase: str,
        step: int,
        *flags: str,
        stalled: tuple[str, int] | None = None,
    ) -> None:
        workers = "1" if stalled else "0"
        words = eight_steps(folder, "run", 2, "--resume", "latest", "--workers", workers, *flags)
        arguments = (words, (what, phase, step), stalled)
        with Launched(folder, torchrun_environments(2), disturbed, *arguments) as run:
            self.codes = run.end()
            self.said = [run.said(0), run.said(1)]
        assert "struck at" in self.said[1], run.all_said
        newest = published(folder / "runs" / "run" / "checkpoints")[-1:]
        assert [fault(path) for path in newest] in ([], [None])
        self.saved = max(map(samples_of, newest), default=0) // GLOBAL_BATCH
        self.made = max(losses(folder, "run"), default=0)


def test_b25_b40_a_run_that_is_stopped_and_killed_again_and_again_loses_nothing(
    tmp_path: Path, calm: Path
) -> None:
    before_the_first_step = Struck(tmp_path, "SIGTERM", "data", 1)
    in_training = Struck(tmp_path, "SIGTERM", "train", 2)
    while_data_stalls = Struck(tmp_path, "SIGTERM", "train", in_training.saved + 2, stalled=("training", 1))
    killed = Struck(tmp_path, "SIGKILL", "train", 6, "--no-async-save")
    in_evaluation = Struck(tmp_path, "SIGTERM", "evaluate", STEPS, stalled=("validation", 0))
    for stopped in (before_the_first_step, in_training, while_data_stalls, in_evaluation):
        assert stopped.codes == [EXIT_REQUEUE] * 2, stopped.said
        assert stopped.saved == stopped.made
    assert while_data_stalls.made == in_training.made + 1
    assert killed.codes == [EXIT_FAILURE, -signal.SIGKILL]
    # Saves are asked for after every other step, so the fifth is made again; rank 0 may be ended before it
    # has noted it.
    assert killed.saved == 4
    assert killed.made in (4, 5)
    last = Finished(tmp_path, eight_steps(tmp_path, "run", 2, "--resume", "latest"))
    assert last.codes == [0, 0], last.said

    assert losses(tmp_path, "run") == losses(calm, "run")
    made = sorted((row["step"], row["loss"]) for row in rows(tmp_path, "run") if "loss" in row)
    assert all(len(set(same)) == 1 for _, same in groupby(made, key=lambda row: row[0]))
    assert len(made) - STEPS == killed.made - killed.saved
    results, expected = rows(tmp_path, "run", "results.jsonl"), rows(calm, "run", "results.jsonl")
    assert [row["step"] for row in results] == [STEPS // 2, STEPS]
    for found, wanted in zip(results, expected, strict=True):
        assert {k: v for k, v in found.items() if "R@" in k} == {k: v for k, v in wanted.items() if "R@" in k}


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 4])
def test_b40_b47_a_killed_run_goes_on_on_other_numbers_of_ranks(
    tmp_path: Path, calm: Path, world_size: int
) -> None:
    killed = Struck(tmp_path, "SIGKILL", "train", 5)
    assert all(killed.codes)
    again = eight_steps(tmp_path, "run", world_size, "--resume", "latest")
    finished = Finished(tmp_path, again, world_size)
    assert finished.codes == [0] * world_size, finished.said
    # On other numbers of ranks sums are taken in another order.
    assert losses(tmp_path, "run") == pytest.approx(losses(calm, "run"), rel=1e-5)


def test_an_error_in_training_is_told_in_full_by_rank_0(tmp_path: Path) -> None:
    broken = Struck(tmp_path, "error", "train", 3)
    assert broken.codes == [EXIT_FAILURE] * 2
    (keys,) = re.findall(r"struck at (.*)", broken.said[1])
    told = re.search(r"rank 1 \(host (\S+)\) failed in phase train, step 3, samples (.*):\n", broken.said[0])
    assert told is not None, broken.said[0]
    assert told[2] == ", ".join(keys.split())
    assert "ValueError: broken" in broken.said[0]
    assert told[0] in (tmp_path / "runs" / "run" / "out.log").read_text()


RESTARTED = """
import os, sys
sys.path[:0] = sys.argv.pop(1).split(":")
from disturbed import cli, strike
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    strike("SIGKILL", "train", 4)
sys.exit(cli.main(sys.argv[1:]))
"""
LAUNCHERS = {
    "torchrun": "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1",
    "shardclip": "launch.py --nproc 2 --max-restarts 1",
}
LAUNCH = """
import sys
from shardclip.launch import launch_command, split_launch_flags
config, words = split_launch_flags(sys.argv[1:])
sys.exit(launch_command(config, [sys.executable, *words]))
"""


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_that_restarts_a_killed_run_goes_on_from_the_latest(
    tmp_path: Path, calm: Path, launcher: str
) -> None:
    (tmp_path / "work.py").write_text(RESTARTED)
    (tmp_path / "launch.py").write_text(LAUNCH)
    words = eight_steps(tmp_path, "run", 2, "--resume", "latest", "--no-async-save")
    command = [
        sys.executable,
        *LAUNCHERS[launcher].split(),
        "work.py",
        str(Path(__file__).parents[1]),
        *words,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "struck at" in done.stdout
    assert re.search(r"resumed \S+samples-000000000016: ", done.stdout)
    assert losses(tmp_path, "run") == losses(calm, "run")


# -- saves


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(number))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            _die()
        return function(*args, **kwargs)

    return wrapped


KILLS = {
    "before a rank writes": (1, "storage", "PublishingWriter", "write_data", 0),
    "within a rank's file": (1, "filesystem", None, "_write_item", 40),
    "after a rank's file": (1, "storage", None, "WriteResult", 0),
    "before the manifest": (0, "folders", None, "write_durably", 0),
    "before the rename": (0, "folders", None, "publish_by_rename", 0),
    "before pruning": (0, "checkpoints", "Checkpoints", "_prune", 0),
}
"""Which rank dies, and at which call of which function."""
MODULES = {
    "storage": storage,
    "folders": folders,
    "filesystem": filesystem,
    "checkpoints": checkpoints_module,
}


def killed_while_saving(
    folder: Path, victim: int, module: str, cls: str | None, name: str, calls: int
) -> None:
    owner = MODULES[module] if cls is None else getattr(MODULES[module], cls)
    checkpoints = open_checkpoints(folder, keep_last=1)
    state = state_of("fsdp")
    step(state, seed=8)
    if checkpoints.rank == victim:
        setattr(owner, name, _die_at_call(calls, getattr(owner, name)))
    checkpoints.save(8, state)
    checkpoints.wait()


LOST = r"the process died|Connection closed|reset by peer|Broken pipe|could not be saved"
"""What tells of a killed rank first: the pool, gloo on the other rank, or that rank's save."""


@pytest.mark.parametrize("moment", KILLS)
def test_b49_b50_a_kill_while_saving_leaves_the_previous_one(ranks: Any, tmp_path: Path, moment: str) -> None:
    before = ranks(2).run(save, tmp_path, 4, "fsdp")[0]
    with pytest.raises(AssertionError, match=LOST):
        ranks(2).run(killed_while_saving, tmp_path, *KILLS[moment])
    published_already = moment == "before pruning"
    for name, loaded in ranks(2).run(resumed, tmp_path, "fsdp"):
        assert name == ("samples-000000000008" if published_already else "samples-000000000004")
        assert (different(before, loaded) == []) != published_already
    assert list(tmp_path.glob("tmp-*")) == []


SOAK = int(os.environ.get("SHARDCLIP_KILLS", "5"))
"""Kills at random moments; `make soak` asks for 50."""


def save_until_killed(folder: Path, seed: int, kill: bool) -> None:
    """Take the newest checkpoint and note which; then save until one rank kills itself in the middle."""
    chance = random.Random(seed)
    state = state_of("fsdp")
    step(state)
    path = load_latest(folder, state)
    checkpoints = open_checkpoints(folder, keep_last=2)
    taken = [0 if path is None else samples_of(path), float(state.model.logit_scale.detach())]
    with (folder / f"taken-{checkpoints.rank}.jsonl").open("a") as file:
        file.write(json.dumps(taken) + "\n")
    victim = chance.randrange(2)
    seconds = 0.0
    for number in itertools.count(1) if kill else ():
        samples = int(state.progress.get("samples", 0)) + 1
        state.progress["samples"] = samples
        with torch.no_grad():
            state.model.logit_scale.fill_(float(samples))
        if number == 3 and checkpoints.rank == victim:
            delay = chance.uniform(0, 1.2 * seconds)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        start = time.perf_counter()
        checkpoints.save(samples, state)
        checkpoints.wait()
        seconds = time.perf_counter() - start


def test_b49_b50_kills_at_random_moments_lose_nothing(ranks: Any, tmp_path: Path) -> None:
    for seed in range(SOAK):
        with pytest.raises(AssertionError, match=LOST):
            ranks(2).run(save_until_killed, tmp_path, seed, True)
        assert [path for path in published(tmp_path) if fault(path) is not None] == []
    ranks(2).run(save_until_killed, tmp_path, SOAK, False)
    taken, by_the_other = (
        [json.loads(line) for line in (tmp_path / f"taken-{rank}.jsonl").read_text().splitlines()]
        for rank in range(2)
    )
    assert taken == by_the_other
    assert len(taken) == SOAK + 1
    # Two saves were finished before the one of the kill, which may be published or not.
    lost = [before + 2 - later for (before, _), (later, _) in pairwise(taken) if later < before + 2]
    assert lost == []
    assert [samples for samples, value in taken[1:] if value != samples] == []


def cut(path: Path) -> str:
    """Cut a file to half."""
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    return "bytes instead of"


def flip(path: Path) -> str:
    """Change one byte, not the size."""
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "has changed since it was written"


def lose(path: Path) -> str:
    """Remove a file."""
    (path / ".metadata").unlink()
    return ".metadata is missing"


def lose_manifest(path: Path) -> str:
    """Remove the list of files."""
    (path / "manifest.json").unlink()
    return "manifest.json is missing"


@pytest.mark.parametrize("damage", [cut, flip, lose, lose_manifest])
def test_b50_a_damaged_newest_one_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], str]
) -> None:
    before = save(tmp_path, 4)
    save(tmp_path, 8)
    expected = damage(published(tmp_path)[-1])
    name, loaded = resumed(tmp_path)
    assert name == "samples-000000000004"
    assert different(before, loaded) == []
    assert expected in caplog.text
    assert "samples-000000000008 is damaged" in caplog.text
    with pytest.raises(UserError, match=expected):
        open_checkpoints(tmp_path, resume=str(published(tmp_path)[-1])).to_resume()


def latest_name(folder: Path) -> str | None:
    path = open_checkpoints(folder).latest()
    return path and path.name


def test_b50_all_ranks_take_the_same_one(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save, tmp_path, 4, "fsdp")
    ranks(2).run(save, tmp_path, 8, "fsdp")
    file = published(tmp_path)[-1] / "__1_0.distcp"  # only one of the ranks reads it
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert ranks(2).run(latest_name, tmp_path) == ["samples-000000000004"] * 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill_the_disk(folder: Path) -> tuple[list[str], list[str], str, list[str]]:
    """Saves until the disk is full: what was reported, what is there, the second failure, what resumes."""
    import logging

    reports: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reports.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardclip.training.checkpoint.checkpoints").addHandler(handler)
    state = state_of("fsdp")
    expected = whole(state)
    checkpoints = open_checkpoints(folder)
    checkpoints.save(4, state)
    checkpoints.wait()
    assert not reports
    step(state)  # the moments that this brings are what the disk has no room for
    checkpoints.save(8, state)
    checkpoints.wait()
    left = sorted(path.name for path in folder.iterdir())
    try:
        checkpoints.save(12, state)
        checkpoints.wait()
    except UserError as error:
        repeated = str(error)
    logging.getLogger("shardclip.training.checkpoint.checkpoints").removeHandler(handler)
    name, loaded = resumed(folder, "fsdp")
    return reports[:1], left, repeated, [str(name), *different(expected, loaded)]


def test_b50_a_full_disk_keeps_the_old_one_and_is_reported(ranks: Any, small_disk: Path) -> None:
    per_rank = ranks(2).run(fill_the_disk, small_disk)
    for reports, _, repeated, outcome in per_rank:
        assert "No space left on device" in reports[0]
        assert "training goes on" in reports[0]
        assert "The save before it failed too" in repeated
        assert outcome == ["samples-000000000004"]
    left_by_rank_0 = per_rank[0][1]
    assert left_by_rank_0 == ["samples-000000000004"]


def test_what_is_left_of_a_killed_save_is_removed_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "tmp-samples-000000000004-1").mkdir()
    (tmp_path / "tmp-samples-000000000004-1" / "__0_0.distcp").write_bytes(b"half")
    assert open_checkpoints(tmp_path).latest() is None
    assert list(tmp_path.iterdir()) == []


def test_a_kill_between_replacing_and_renaming_brings_the_old_one_back(tmp_path: Path) -> None:
    before = save(tmp_path, 4)
    (path,) = published(tmp_path)
    path.rename(tmp_path / "tmp-samples-000000000004-1-replaced")
    name, loaded = resumed(tmp_path)
    assert name == path.name
    assert different(before, loaded) == []
    assert list(tmp_path.iterdir()) == [path]


def test_resume_latest_of_a_new_run_is_a_new_start(tmp_path: Path) -> None:
    assert open_checkpoints(tmp_path, resume="latest").to_resume() is None
    assert open_checkpoints(tmp_path).to_resume() is None
    with pytest.raises(UserError, match="not a whole checkpoint"):
        open_checkpoints(tmp_path, resume=str(tmp_path / "elsewhere")).to_resume()
