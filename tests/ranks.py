"""Real processes for distributed tests: one start, many cases.

`RankPool(n).run(function, *args)` calls `function(*args)` on n processes joined by gloo and returns the n
results in rank order. Processes are forked from a server that has imported torch, open_clip and the training
loop once, so a pool starts in well under a second. A case that raises on any rank, or hangs, ends the
pool's processes; the next case gets new ones.
"""

import faulthandler
import functools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from launched import HANG_SECONDS

from shardclip.training import parallel

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "open_clip", "shardclip.training.loop"])


def _serve(rank: int, world_size: int, rendezvous: str, pipe: Connection) -> None:
    faulthandler.enable()  # an abort in C leaves no other trace
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    # A mesh leaves its groups behind, and each wakes a thread a hundred times a second, for ever.
    parallel.init_device_mesh = functools.cache(parallel.init_device_mesh)  # type: ignore[assignment]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=HANG_SECONDS),
    )
    while (call := pipe.recv()) is not None:
        function, args = call
        try:
            torch.manual_seed(0)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class RankPool:
    """`world_size` gloo processes that run one function after another."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        rendezvous = os.path.join(tempfile.mkdtemp(prefix="ranks-"), "rendezvous")
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, self.world_size, rendezvous, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank; the results in rank order.

        `function` must be importable (defined at the top level of a test module) and its arguments and
        results picklable (plain types, numpy arrays, CPU tensors without graph).
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        failure: str | None = None
        pending = dict(zip(self._pipes, range(self.world_size), strict=True))
        while pending and failure is None:
            ready = wait(list(pending), HANG_SECONDS)
            if not ready:
                failure = f"ranks {sorted(pending.values())} gave no answer in {HANG_SECONDS} s"
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[index]
                try:
                    good, answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    good, answers[rank] = False, "the process died"
                if not good:
                    failure = f"rank {rank}: {answers[rank]}"
        if failure is not None:
            self.close()
            raise AssertionError(failure)
        return [answers[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
