"""Processes: how they find each other, and that a failure, a death or a signal of one is all ranks' business.

The signals come from the processes themselves at a known point, so no test has to guess a moment.
"""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlparse

import pytest
import torch
import torch.distributed as dist
from launched import HANG_SECONDS, Launched, free_port, torchrun_environments

from shardclip.errors import UserError
from shardclip.training import failure
from shardclip.training.distributed import DistributedConfig, Processes, RemoteFailure, current
from shardclip.training.environment import expand_repeats, first_host, read_environment
from shardclip.training.failure import EXIT_FAILURE, EXIT_REQUEUE, EXIT_USER
from shardclip.training.fetching import Stoppable
from shardclip.training.signals import StopRequest, stop_on_signals
from shardclip.training.worker import run_worker

CPU = DistributedConfig(device="cpu")
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {
    **ALLOCATION,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "localhost",
}


# -- the environment


def test_torchrun_variables_are_read() -> None:
    launch = read_environment(torchrun_environments(2)[1])
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (1, 2, 1, 2)
    assert (launch.source, launch.rendezvous) == ("torchrun", "env://")


def test_a_step_of_srun_is_read() -> None:
    launch = read_environment({**STEP, "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2"})
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (1, 2, 0, 1)
    assert (launch.source, launch.host) == ("slurm", "n2")
    assert launch.rendezvous == f"tcp://localhost:{10_000 + (7 + 3 * 4_099) % 20_000}"


def test_b22_variables_of_an_allocation_are_one_process() -> None:
    launch = read_environment(ALLOCATION)
    assert (launch.rank, launch.world_size, launch.source) == (0, 1, "single")
    assert "SLURM_NTASKS=2" in launch.note


def test_b22_an_interactive_shell_of_a_step_is_one_process() -> None:
    assert read_environment({**STEP, "SLURM_PTY_PORT": "40000"}).world_size == 1


def test_b22_launcher_variables_win_over_a_step() -> None:
    for rank, environment in enumerate(torchrun_environments(2)):
        launch = read_environment({**STEP, **environment})
        assert (launch.rank, launch.source) == (rank, "torchrun")


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='x'"),
        ({**STEP, "SLURM_PROCID": "2"}, "SLURM_PROCID=2"),
    ],
)
def test_contradictory_variables_are_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_environment(environment)


def test_slurm_notation() -> None:
    assert [first_host(nodes) for nodes in ("gpu[003-006,9],x1", "n1,n2", "a-b-7", "r[1-2]n")] == [
        "gpu003",
        "n1",
        "a-b-7",
        "r1n",
    ]
    assert expand_repeats("4(x2),3") == [4, 4, 3]


# -- meeting


def _introduce() -> int:
    return run_worker(lambda processes: print(f"I am {processes.rank} of {processes.world_size}") or 0, CPU)


def test_b22_a_plain_process_in_an_allocation_runs_alone(tmp_path: Path) -> None:
    with Launched(tmp_path, [ALLOCATION], _introduce) as run:
        assert run.end() == [0]
        assert "I am 0 of 1" in run.said(0)
        assert "SLURM_NTASKS=2" in run.said(0)


def test_b22_launcher_variables_in_an_allocation_are_two_ranks_and_rank_0_shows_who_is_where(
    tmp_path: Path,
) -> None:
    environments = [
        {**ALLOCATION, **environment, "SLURMD_NODENAME": f"n{rank}"}
        for rank, environment in enumerate(torchrun_environments(2))
    ]
    with Launched(tmp_path, environments, _introduce) as run:
        assert run.end() == [0, 0]
        assert "I am 0 of 2" in run.said(0)
        assert "I am 1 of 2" in run.said(1)
        assert "from RANK and WORLD_SIZE:\n  n0: rank 0 (cpu)\n  n1: rank 1 (cpu)\n" in run.said(0)
        assert "n0" not in run.said(1)


def _job_that_can_meet() -> dict[str, str]:
    """A step of a job whose number leads to a port that nobody listens on, such as a daemon of SLURM."""
    for number in count(os.getpid()):
        job = {**STEP, "SLURM_JOB_ID": str(number)}
        port = urlparse(read_environment(job).rendezvous).port
        assert port is not None
        with suppress(OSError):
            free_port(port)
            return job
    raise AssertionError


def test_b22_tasks_of_a_step_meet_by_its_node_list(tmp_path: Path) -> None:
    job = _job_that_can_meet()
    environments = [
        {**job, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURMD_NODENAME": f"n{rank}"}
        for rank in range(2)
    ]
    with Launched(tmp_path, environments, _introduce) as run:
        assert run.end() == [0, 0]
        assert "I am 1 of 2" in run.said(1)
        assert "from the variables of srun's step" in run.said(0)


def _wait_for_nobody() -> int:
    return run_worker(lambda processes: 0, DistributedConfig(device="cpu", dist_start_minutes=0.02))


def test_b22_a_rank_whose_peers_were_never_started_says_so(tmp_path: Path) -> None:
    with Launched(tmp_path, torchrun_environments(2)[:1], _wait_for_nobody) as run:
        assert run.end() == [EXIT_USER]
        assert "Rank 0 of 2 (torchrun" in run.said(0)
        assert "Were 2 processes started" in run.said(0)


def test_there_is_no_gpu_to_ask_for(tmp_path: Path) -> None:
    """Rank 0, which holds the store, waits for a rank that reads late in it why the start has failed."""
    os.mkfifo(tmp_path / "open until rank 0 ends")
    with Launched(tmp_path, torchrun_environments(2), _ask_for_a_gpu, tmp_path) as run:
        assert run.end() == [EXIT_USER] * 2
        assert "--device cpu" in run.said(0)


def _ask_for_a_gpu(folder: Path) -> int:
    torch.cuda.is_available = lambda: False
    meet, is_first = Processes._meet, os.environ["RANK"] == "0"
    end = os.open(folder / "open until rank 0 ends", os.O_WRONLY if is_first else os.O_RDONLY)

    def meet_and_linger(self: Processes, key: str) -> None:
        meet(self, key)
        if not is_first:
            ended = select.poll()
            ended.register(end)
            ended.poll(2000)

    Processes._meet = meet_and_linger  # type: ignore[method-assign]
    return run_worker(lambda processes: 0, DistributedConfig(device="cuda"))


# -- agreeing


def _work_that_fails(failing: list[int], kind: type[Exception]) -> str:
    processes = current()
    try:
        with processes.together("reading the list"):
            if processes.rank in failing:
                raise kind("no such file")
    except (UserError, RemoteFailure) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def test_work_together_passes_when_nobody_fails(ranks: Any) -> None:
    assert ranks(2).run(_work_that_fails, [], UserError) == ["passed"] * 2


def test_a_users_mistake_on_one_rank_is_raised_on_all_and_names_it(ranks: Any) -> None:
    first, second = ranks(2).run(_work_that_fails, [1], UserError)
    assert first == second
    assert first.startswith("UserError: no such file\n(while reading the list, on rank 1 of 2")


def test_a_mistake_that_all_ranks_see_needs_no_rank(ranks: Any) -> None:
    assert ranks(2).run(_work_that_fails, [0, 1], UserError) == ["UserError: no such file"] * 2


def test_an_error_on_one_rank_is_raised_on_all_with_its_trace(ranks: Any) -> None:
    first, second = ranks(2).run(_work_that_fails, [1], OSError)
    assert first == second
    assert first.startswith("RemoteFailure: reading the list failed on rank 1")
    assert first.endswith("OSError: no such file")


def _exchange() -> tuple[list[int], str, bool, bool]:
    processes = current()
    before = processes.stop_agreed()
    if processes.rank == 1:
        processes.stop.request("test")
    gathered = processes.all_gather_object(processes.rank * 10)
    return gathered, processes.broadcast_object(f"of {processes.rank}", 1), before, processes.stop_agreed()


def test_objects_and_the_wish_of_one_rank_reach_all(ranks: Any) -> None:
    assert ranks(2).run(_exchange) == [([0, 10], "of 1", False, True)] * 2


def test_one_process_needs_no_group() -> None:
    processes = current()
    processes.barrier()
    assert processes.all_gather_object(3) == [3]
    assert processes.broadcast_object(3) == 3
    with pytest.raises(KeyError), processes.together("work"):
        raise KeyError


def _wait_for_the_busy() -> int:
    def work(processes: Processes) -> int:
        # Not as a setting: the ranks also meet by collectives, and a busy machine may be late there.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
        if processes.is_primary:
            time.sleep(6)
        processes.barrier()
        return 0

    return run_worker(work, CPU)


@pytest.mark.long
def test_b03_a_barrier_outlasts_the_timeout_of_collectives(tmp_path: Path) -> None:
    with Launched(tmp_path, torchrun_environments(2), _wait_for_the_busy) as run:
        assert run.end() == [0, 0]


# -- failing


def _fail_at_step_3(how: str, victim: int, here_is_remote: bool = False) -> int:
    def work(processes: Processes) -> int:
        values = torch.zeros(1)
        for step in range(1, 5):
            processes.position.at("train", step, ["a.tar:0007"])
            if step == 3 and processes.rank == victim:
                if how == "error":
                    raise ValueError("broken")
                if how == "mistake":
                    raise UserError("a.tar is broken")
                os.kill(os.getpid(), signal.Signals[how])
            dist.all_reduce(values)
        return 0

    if here_is_remote:
        failure._process_namespace = lambda: ""
    return run_worker(work, DistributedConfig(device="cpu", dist_lost_seconds=2))


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_on_one_rank_ends_all_and_is_reported_once(tmp_path: Path, victim: int) -> None:
    with Launched(tmp_path, torchrun_environments(2), _fail_at_step_3, "error", victim) as run:
        assert run.end() == [EXIT_FAILURE] * 2
        assert run.all_said.count("ValueError: broken") == 1
        assert f"rank {victim} (host " in run.said(0)
        assert "failed in phase train, step 3, samples a.tar:0007:" in run.said(0)


def _fail_while_the_other_is_late(victim: int) -> int:
    end = failure.Watcher._end

    def late(self: failure.Watcher, cause: failure.Failure) -> NoReturn:
        if self._processes.rank != victim:
            select.select(self._peers, [], [])  # until the victim has waited in vain and is gone
        end(self, cause)

    failure.Watcher._end = late  # type: ignore[method-assign]
    return _fail_at_step_3("error", victim)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_is_reported_once_when_the_other_rank_is_late(tmp_path: Path, victim: int) -> None:
    with Launched(tmp_path, torchrun_environments(2), _fail_while_the_other_is_late, victim) as run:
        assert run.end() == [EXIT_FAILURE] * 2
        assert run.all_said.count("ValueError: broken") == 1


def test_a_mistake_found_on_one_rank_ends_all_with_its_message_alone(tmp_path: Path) -> None:
    with Launched(tmp_path, torchrun_environments(2), _fail_at_step_3, "mistake", 1) as run:
        assert run.end() == [EXIT_USER] * 2
        assert run.said(0).endswith("shardclip: a.tar is broken\n")
        assert run.said(1) == ""


def _all_see_the_mistake() -> int:
    def work(processes: Processes) -> int:
        raise UserError("no such shard")

    return run_worker(work, CPU)


def test_a_mistake_found_on_all_ranks_is_printed_once(tmp_path: Path) -> None:
    with Launched(tmp_path, torchrun_environments(2), _all_see_the_mistake) as run:
        assert run.end() == [EXIT_USER] * 2
        assert run.all_said.count("no such shard") == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others(tmp_path: Path, victim: int) -> None:
    with Launched(tmp_path, torchrun_environments(2), _fail_at_step_3, "SIGKILL", victim) as run:
        codes = run.end()
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] == EXIT_FAILURE
        # With rank 0 gone its store is too, so rank 1 can only say that.
        said = run.said(1 - victim)
        assert f"rank {victim} (host" in said if victim else "rank 0 or the launcher is gone" in said


def test_processes_that_are_started_again_do_not_see_what_ended_the_first(tmp_path: Path) -> None:
    """An agent of torchrun keeps its store from one start to the next."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environments = [environment | kept for environment in torchrun_environments(2)]
    with Launched(tmp_path, environments, _fail_at_step_3, "SIGKILL", 1) as run:
        assert run.end() == [EXIT_FAILURE, -signal.SIGKILL]
    with Launched(tmp_path, environments, _introduce) as run:
        assert run.end() == [0, 0], run.all_said


def test_a_silent_rank_on_another_host_ends_the_others(tmp_path: Path) -> None:
    with Launched(tmp_path, torchrun_environments(2), _fail_at_step_3, "SIGSTOP", 1, True) as run:
        run.processes[0].join(HANG_SECONDS)
        assert run.processes[0].exitcode == EXIT_FAILURE
        assert "no sign of life for 2 seconds" in run.said(0)


# -- stopping


def _stop_when_rank_1_is_told(number: int) -> int:
    def work(processes: Processes) -> int:
        # Rank 0's loader never gives a batch; rank 1 waits for rank 0 in the agreement of the step.
        source = Stoppable(_stalled() if processes.is_primary else iter(range(100)), processes.stop)
        batch = source.take()
        if processes.rank == 1:
            threading.Timer(0.2, os.kill, [os.getpid(), number]).start()
        if processes.stop_agreed():
            print("stops with", batch, processes.stop.reason)
            return EXIT_REQUEUE
        return 0

    return run_worker(work, CPU)


def _stalled() -> Any:
    threading.Event().wait()
    yield 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_b25_a_signal_to_one_rank_stops_all_while_a_loader_stalls(tmp_path: Path, number: int) -> None:
    with Launched(tmp_path, torchrun_environments(2), _stop_when_rank_1_is_told, number) as run:
        assert run.end() == [EXIT_REQUEUE] * 2
        assert f"stops with None {signal.Signals(number).name} on rank 1" in run.said(0)
        assert "stops with 0" in run.said(1)


def _survive_a_forked_child() -> int:
    def work(processes: Processes) -> int:
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.write(told, b"x")
            signal.pause()
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        print("child ended by", os.WTERMSIG(os.waitpid(child, 0)[1]), "stop asked:", processes.stop.requested)
        return 0

    return run_worker(work, CPU)


def test_signals_to_loader_workers_are_not_the_ranks(tmp_path: Path) -> None:
    with Launched(tmp_path, [{}], _survive_a_forked_child) as run:
        assert run.end() == [0]
        assert f"child ended by {int(signal.SIGTERM)} stop asked: False" in run.said(0)


def test_a_signal_tells_those_who_listen() -> None:
    stop, noticed = StopRequest(), threading.Event()
    stop.tell(noticed.set)
    with stop_on_signals(stop):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert noticed.wait(HANG_SECONDS)
    assert stop.reason == "SIGUSR1"


def test_a_stoppable_source_passes_on_what_its_source_does() -> None:
    def failing() -> Any:
        yield 1
        raise OSError("gone")

    source = Stoppable(failing(), StopRequest())
    assert source.take() == 1
    with pytest.raises(OSError, match="gone"):
        source.take()
    with pytest.raises(StopIteration):
        Stoppable(iter([]), StopRequest()).take()
