"""The end of one rank is the end of all: within seconds, with one report that names the cause.

An exception on one rank leaves the others in a collective until it times out, and what they then report is
the symptom. So each rank runs a thread that looks at the store: the first failure written there ends every
process, and rank 0 prints it. A rank that died without a word is noticed by those on its host (its process
ended) or, from other hosts, by its missing heartbeat. The same thread passes on the wish to stop.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from shardclip.errors import UserError, complain
from shardclip.training.distributed import GOODBYE, Processes

EXIT_FAILURE = 1
"""Something broke; a restart may help."""
EXIT_USER = 2
"""A mistake in flags, data or environment: a restart will not help."""
EXIT_REQUEUE = 85
"""The run was asked to stop, has saved, and goes on under the same command: batch scripts requeue on it."""


@dataclass(frozen=True)
class Failure:
    """Why the run ends, as all ranks are told."""

    rank: int
    host: str
    position: str
    text: str
    code: int
    died: bool = False
    """Whether the rank is gone, so that others had to say it."""

    @classmethod
    def of(cls, error: BaseException, processes: Processes) -> Failure:
        """This rank's failure with `error`."""
        if isinstance(error, UserError):
            text, code = str(error), EXIT_USER
        else:
            text = "".join(traceback.format_exception(error)).rstrip()
            code = 130 if isinstance(error, KeyboardInterrupt) else EXIT_FAILURE
        return cls(processes.rank, processes.host, str(processes.position), text, code)

    def __str__(self) -> str:
        if self.code == EXIT_USER:
            return f"shardclip: {self.text}"
        return f"shardclip: rank {self.rank} (host {self.host}) failed in {self.position}:\n{self.text}"


class Watcher:
    """The thread of one rank that ends it when another fails; a context around the work.

    Entering is a collective. The work's own exception is handed to `fail`, which does not return.
    """

    def __init__(self, processes: Processes, lost_seconds: float) -> None:
        assert processes.store is not None
        self._processes = processes
        self._store = processes.store.clone()
        self._lost_seconds = lost_seconds
        # A thousand ranks ask the one store twice as rarely as a few.
        self._interval = 0.5 + processes.world_size / 2000
        self._beats = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._peers: dict[int, int] = {}
        self._hosts: list[str] = []
        self._remote: list[int] = []
        self._next_round = 0.0
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def __enter__(self) -> Watcher:
        here = _process_namespace()
        everybody = self._processes.all_gather_object((here, os.getpid(), self._processes.host))
        self._hosts = [host for _, _, host in everybody]
        for rank, (namespace, pid, _) in enumerate(everybody):
            if rank == self._processes.rank:
                continue
            if here and namespace == here:
                self._peers[os.pidfd_open(pid)] = rank
            elif self._processes.is_primary or rank == 0:
                self._remote.append(rank)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._wake_write, b"x")
        self._thread.join()
        for descriptor in (*self._peers, self._wake_read, self._wake_write):
            os.close(descriptor)

    def finish(self) -> None:
        """Say that this rank's work is done and wait, still watching, until that of all ranks is."""
        self._processes.position.at("finish")
        assert self._processes.store is not None
        self._processes.store.set(f"finished/{self._processes.rank}", "1")
        self._processes.barrier()

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks for this rank's `error`, or for the cause behind it that another rank knows."""
        if _is_symptom(error):
            # A peer's death closes connections at once; give those who see the death time to say so.
            time.sleep(self._lost_seconds * 1.5 if self._remote else 3.0)
        assert self._processes.store is not None
        _claim(self._processes.store, Failure.of(error, self._processes))
        self._thread.join()
        raise AssertionError("the watcher ends the process")

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in (*self._peers, self._wake_read):
            poll.register(descriptor, select.POLLIN)
        while True:
            ended = [descriptor for descriptor, _ in poll.poll(self._interval * 1000)]
            if self._wake_read in ended:
                return
            try:
                self._beat()
                self._share_stop()
                for descriptor in ended:
                    poll.unregister(descriptor)
                    self._report_lost(self._peers[descriptor], "its process ended without a word (killed?)")
                self._listen_to_remote()
                if self._store.check(["failure"]):
                    self._end(Failure(**json.loads(self._store.get("failure"))))
            except dist.DistError as error:
                self._end_alone(error)

    def _beat(self) -> None:
        self._beats += 1
        beat = json.dumps([self._beats, str(self._processes.position)])
        self._store.set(f"beat/{self._processes.rank}", beat)

    def _share_stop(self) -> None:
        stop = self._processes.stop
        if self._store.check(["stop"]):
            stop.request(self._store.get("stop").decode())
        elif stop.requested:
            self._store.set("stop", f"{stop.reason} on rank {self._processes.rank}")

    def _listen_to_remote(self) -> None:
        now = time.monotonic()
        if now < self._next_round:
            return
        self._next_round = now + self._lost_seconds / 10
        for rank in self._remote:
            beat = self._last_beat(rank)[0]
            known, since = self._heard.get(rank, (-1, now))
            if beat != known:
                self._heard[rank] = (beat, now)
            elif now - since > self._lost_seconds:
                self._report_lost(rank, f"no sign of life for {self._lost_seconds:g} seconds")

    def _last_beat(self, rank: int) -> tuple[int, str]:
        key = f"beat/{rank}"
        return tuple(json.loads(self._store.get(key))) if self._store.check([key]) else (0, "phase start")

    def _report_lost(self, rank: int, how: str) -> None:
        if self._store.check([f"finished/{rank}"]):
            return
        position = self._last_beat(rank)[1]
        _claim(self._store, Failure(rank, self._hosts[rank], position, how, EXIT_FAILURE, died=True))

    def _end(self, failure: Failure) -> NoReturn:
        """Rank 0 reports (rank 1 if 0 is dead), all wait for the report, and the reporter goes last."""
        code = exit_code_for_launcher(failure.code)
        guard = threading.Timer(GOODBYE.total_seconds() * 3, os._exit, [code])
        guard.daemon = True
        guard.start()
        reporter = 1 if failure.died and failure.rank == 0 else 0
        others = self._processes.world_size - 1 - failure.died
        try:
            if self._processes.rank == reporter:
                self._report_once(failure)
                self._store.set("reported", "1")
                if others:
                    self._store.wait(["all_told"], GOODBYE)
            else:
                self._store.wait(["reported"], GOODBYE)
                if self._store.add("told", 1) == others:
                    self._store.set("all_told", "1")
        except dist.DistError:
            # A reporter that waited in vain for the others has reported.
            if self._processes.rank == failure.rank != reporter:
                self._report_once(failure)
        _leave_now(code)

    def _report_once(self, failure: Failure) -> None:
        """Report, unless another rank has: a reporter that was waited for in vain may be late, not gone."""
        with suppress(dist.DistError):  # without the store nobody can tell: better twice than not at all
            if self._store.add("reports", 1) > 1:
                return
        report(failure, self._processes.report_files)

    def _end_alone(self, error: dist.DistError) -> NoReturn:
        processes = self._processes
        how = f"rank 0 or the launcher is gone: the store does not answer ({str(error).splitlines()[0]})"
        failure = Failure(processes.rank, processes.host, str(processes.position), how, EXIT_FAILURE)
        report(failure, processes.report_files)
        _leave_now(EXIT_FAILURE)


def _claim(store: dist.Store, failure: Failure) -> None:
    """Write `failure` to the store unless there is an earlier one."""
    if store.add("failures", 1) == 1:
        store.set("failure", json.dumps(asdict(failure)))


def _is_symptom(error: BaseException) -> bool:
    """Whether `error` is what a collective or the store says when another rank is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _process_namespace() -> str:
    """What two processes share if each sees the other's process id; empty where that cannot be known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def exit_code_for_launcher(code: int) -> int:
    """The code to end this process with; leaves the real one for `shardclip --nproc` where that started us.

    torchrun's agent would restart workers that end with any code but 0. A user's mistake and an agreed stop
    are final, so the agent sees 0 and our launcher reads the code.
    """
    folder = os.environ.get("SHARDCLIP_LAUNCH_DIR")
    if folder is None or code not in (EXIT_USER, EXIT_REQUEUE):
        return code
    with open(os.path.join(folder, "exit-code"), "w") as file:
        file.write(str(code))
    return 0


def report(failure: Failure, files: Iterable[Path]) -> None:
    """Say on standard error, and in log files, why the run ends."""
    complain(str(failure))
    for path in files:
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{failure}\n")


def _leave_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
