"""`--nproc`: torchrun's agent with our words untouched, our exit codes, and our signals."""

import logging
import re
import signal
import sys
from pathlib import Path

import pytest
from launched import Launched, free_port

from commands import small_run
from shardclip.errors import UserError
from shardclip.launch import LaunchConfig, launch_command, split_launch_flags
from shardclip.training.checkpoint import published
from shardclip.training.failure import EXIT_REQUEUE, EXIT_USER

# Words that torchrun's own parser takes for its options, or for two of them.
CONFUSABLE = [
    "--logs",
    "logs/",
    "--log",
    "x",
    "--node",
    "1",
    "--max",
    "2",
    "--no",
    "--n=3",
    "--master",
    "a b",
    "-m",
]

TELL = """
import json, os, sys
from pathlib import Path
from shardclip.training.environment import read_environment
launch = read_environment(os.environ)
place = Path(sys.argv[1], f"{os.environ['NODE']}-{launch.rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
place.write_text(json.dumps(sys.argv[2:]))
sys.exit(int(os.environ.get("FAIL", "0")) if launch.rank == 1 else 0)
"""

WORK = """
import os, signal, sys, threading
from shardclip.errors import UserError
from shardclip.training.distributed import DistributedConfig
from shardclip.training.worker import run_worker

def work(processes):
    if sys.argv[1] == "mistake":
        raise UserError("no such shard")
    if processes.is_primary:
        os.kill(os.getppid(), signal.SIGUSR1)
    asked = threading.Event()
    processes.stop.tell(asked.set)
    asked.wait()
    assert processes.stop_agreed()
    print(f"stopped by {processes.stop.reason}\\n", end="", flush=True)
    return 85

sys.exit(run_worker(work, DistributedConfig(device="cpu")))
"""


# -- words


def test_launch_flags_are_taken_out_and_the_others_stay_as_they_are() -> None:
    config, words = split_launch_flags(["--lr", "1", "--nproc=2", "--fsdp", "--max-restarts", "3", "--", "x"])
    assert config == LaunchConfig(nproc=2, max_restarts=3)
    assert words == ["--lr", "1", "--fsdp", "--", "x"]


def test_no_flag_is_taken_for_a_launch_flag_that_it_begins() -> None:
    assert split_launch_flags(["--np", "2", "--nproc_", "2", *CONFUSABLE]) == (
        LaunchConfig(),
        ["--np", "2", "--nproc_", "2", *CONFUSABLE],
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--nproc"], "--nproc"),
        (["--nproc", "two"], "'two'"),
        (["--nproc", "0"], "at least 1"),
        (["--nnodes", "2"], "--nproc"),
        (["--nproc", "2", "--nnodes", "2"], "--rdzv-endpoint"),
    ],
)
def test_a_wrong_launch_is_refused(words: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        split_launch_flags(words)


def test_a_launcher_is_not_started_by_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="RANK=0"):
        split_launch_flags(["--nproc", "2"])


# -- launches


def _launch(config: LaunchConfig, *command: str) -> int:
    logging.getLogger().handlers.clear()
    return launch_command(config, [sys.executable, *command])


@pytest.fixture
def tell(tmp_path: Path) -> str:
    """A script that writes down its words, rank and launcher, without torch."""
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    (tmp_path / "told").mkdir()
    return str(script)


@pytest.fixture
def work(tmp_path: Path) -> str:
    """A script whose ranks run `run_worker`."""
    script = tmp_path / "work.py"
    script.write_text(WORK)
    return str(script)


def _told(tmp_path: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (tmp_path / "told").iterdir()}


def test_b62_words_reach_the_workers_untouched(tmp_path: Path, tell: str) -> None:
    folder = str(tmp_path / "told")
    with Launched(
        tmp_path, [{"NODE": "n"}], _launch, LaunchConfig(nproc=2), tell, folder, *CONFUSABLE
    ) as run:
        assert run.end() == [0]
        words = "[" + ", ".join(f'"{word}"' for word in CONFUSABLE) + "]"
        assert _told(tmp_path) == {"n-0-0": words, "n-1-0": words}
        assert run.said(0) == ""


def test_the_code_of_a_failed_worker_is_passed_on_after_its_restarts(tmp_path: Path, tell: str) -> None:
    config = LaunchConfig(nproc=2, max_restarts=1)
    environment = {"NODE": "n", "FAIL": "7"}
    with Launched(tmp_path, [environment], _launch, config, tell, str(tmp_path / "told")) as run:
        assert run.end() == [7]
        assert {"n-1-0", "n-1-1"} <= set(_told(tmp_path))
        assert run.said(0) == ""


def _two_launchers(folder: Path, *command: str) -> str:
    """The same command on the "machines" a and b, which meet and end well; what both have said."""
    config = LaunchConfig(nproc=1, nnodes=2, rdzv_endpoint=f"127.0.0.1:{free_port()}")
    environments = [{"NODE": name, "SLURMD_NODENAME": name, "HOSTNAME": name} for name in ("a", "b")]
    with Launched(folder, environments, _launch, config, *command) as run:
        assert run.end() == [0, 0], run.all_said
        return run.all_said


@pytest.mark.long
def test_b23_whichever_launcher_holds_rank_0_it_is_one(tmp_path: Path, tell: str) -> None:
    """Twenty meetings of two launchers; who is rank 0 is theirs to decide."""
    for attempt in range(20):
        told = tmp_path / "told" / str(attempt)
        told.mkdir()
        _two_launchers(tmp_path, tell, str(told))
        names = sorted(path.name.split("-")[:2] for path in told.iterdir())
        assert [name for name, _ in names] == ["a", "b"]
        assert sorted(rank for _, rank in names) == ["0", "1"]


@pytest.mark.long
def test_b23_a_run_of_two_launchers_has_one_log_and_one_writer(tmp_path: Path) -> None:
    words = ["train", *small_run(tmp_path), "--dataset-type", "synthetic", "--fsdp"]
    said = _two_launchers(tmp_path, "-m", "shardclip", *words)
    assert said.count("Train Epoch: 0 [16/16 (100%)]") == 1
    run = tmp_path / "runs" / "first"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert [path.name for path in (run / "logs").iterdir()] == ["rank-1.log"]
    assert [path.name for path in published(run / "checkpoints")] == ["samples-000000000016"]
    hosts = dict(re.findall(r"^  ([ab]): rank (\d)", said, re.MULTILINE))
    assert sorted(hosts.values()) == ["0", "1"]


def test_machines_that_do_not_come_are_named(tmp_path: Path, tell: str) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    config = LaunchConfig(nproc=1, nnodes=2, rdzv_endpoint=endpoint, rdzv_minutes=0.05)
    with Launched(tmp_path, [{}], _launch_alone, config, tell) as run:
        assert run.end() == [EXIT_USER]
        assert f"The 2 machines did not meet at {endpoint}" in run.said(0)


def _launch_alone(config: LaunchConfig, script: str) -> int:
    try:
        return _launch(config, script)
    except UserError as error:
        print(error)
        return EXIT_USER


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("mistake", EXIT_USER, "shardclip: no such shard"),
        ("signal", EXIT_REQUEUE, "stopped by SIGUSR1"),
    ],
)
def test_the_workers_code_and_message_come_out_once(
    tmp_path: Path, work: str, what: str, code: int, said: str
) -> None:
    with Launched(tmp_path, [{}], _launch, LaunchConfig(nproc=2, max_restarts=3), work, what) as run:
        assert run.end() == [code]
        assert run.said(0).count(said) == (2 if what == "signal" else 1)
        assert "elastic" not in run.said(0)


def test_a_killed_worker_is_named_by_its_signal(tmp_path: Path) -> None:
    script = tmp_path / "die.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with Launched(tmp_path, [{}], _launch, LaunchConfig(nproc=1), str(script)) as run:
        assert run.end() == [128 + signal.SIGKILL]
        assert run.said(0) == "shardclip: the process of rank 0 was ended by SIGKILL (out of memory?)\n"


def test_the_output_of_the_other_ranks_goes_to_files(tmp_path: Path) -> None:
    script = tmp_path / "speak.py"
    script.write_text("import os; print('rank', os.environ['RANK'])")
    config = LaunchConfig(nproc=2, rank_logs=str(tmp_path / "logs"))
    with Launched(tmp_path, [{}], _launch, config, str(script)) as run:
        assert run.end() == [0]
        assert run.said(0) == "rank 0\n"
        assert [path.read_text() for path in (tmp_path / "logs").rglob("1/stdout.log")] == ["rank 1\n"]
