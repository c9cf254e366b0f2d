"""One process of a run, from its start to its exit code: what every verb that computes runs inside.

def work(processes: Processes) -> int: ...
sys.exit(run_worker(work, config.distributed))
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from shardclip.errors import UserError, complain
from shardclip.training.distributed import DistributedConfig, Processes, start
from shardclip.training.failure import EXIT_USER, Failure, Watcher, exit_code_for_launcher, report
from shardclip.training.heap import keep_freed_memory
from shardclip.training.signals import StopRequest, stop_on_signals


def run_worker(main: Callable[[Processes], int], config: DistributedConfig) -> int:
    """`main(processes)` among all ranks of the launch; returns the exit code of this process.

    Stop signals set `processes.stop`, on all ranks. An exception on any rank ends all of them, within seconds
    and with one report on rank 0: a `UserError` as its message with exit code 2, another with rank, host,
    phase, step, samples and its trace and exit code 1. In a run of several processes that ending does not
    return from here: a rank that waits in a collective cannot be unwound.
    """
    keep_freed_memory()
    stop = StopRequest()
    with stop_on_signals(stop):
        _register_with_launcher(stop)
        try:
            with start(config, stop) as processes:
                work = _run_among_others if processes.is_distributed else _run_alone
                code = work(main, processes, config.dist_lost_seconds)
        except UserError as error:
            # The ranks have not met yet, so each speaks for itself.
            complain(f"shardclip: {error}")
            code = EXIT_USER
    if "RANK" in os.environ:
        # torchrun sends SIGTERM to those who leave after the first; the work is done.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return exit_code_for_launcher(code)


def _run_among_others(main: Callable[[Processes], int], processes: Processes, lost_seconds: float) -> int:
    with Watcher(processes, lost_seconds) as watcher:
        try:
            code = main(processes)
            watcher.finish()
        except BaseException as error:
            watcher.fail(error)
    return code


def _run_alone(main: Callable[[Processes], int], processes: Processes, lost_seconds: float) -> int:
    try:
        return main(processes)
    except (Exception, KeyboardInterrupt) as error:
        failure = Failure.of(error, processes)
        report(failure, processes.report_files)
        return failure.code


def _register_with_launcher(stop: StopRequest) -> None:
    """Tell `shardclip --nproc` whom to pass signals to, and take one that came before."""
    folder = os.environ.get("SHARDCLIP_LAUNCH_DIR")
    if folder is None:
        return
    Path(folder, f"worker-{os.getpid()}").touch()
    early = Path(folder, "stop")
    if early.exists():
        stop.request(early.read_text())
