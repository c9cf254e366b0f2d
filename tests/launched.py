"""Processes that meet by their environment alone, as under a launcher, and end with exit codes of their own.

Unlike a `RankPool`, whose processes are joined already and serve many cases, these are started for one case
and may die in it. They are forked from the server that has imported torch, so a start takes no time.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

HANG_SECONDS = 900
"""A test gives up after so long. It ends hangs alone: a busy machine makes minutes of what takes seconds."""

_context = multiprocessing.get_context("forkserver")
_LAUNCHERS = ("SLURM", "TORCHELASTIC", "SHARDCLIP", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


def _be(function: Callable[..., int | None], args: tuple, environment: dict[str, str], output: str) -> None:
    for name in list(os.environ):
        if name.startswith(_LAUNCHERS):
            del os.environ[name]
    os.environ.update(environment)
    # What a process that no server has started would do: loader workers are forked, and are there at once.
    multiprocessing.set_start_method("fork", force=True)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", buffering=1, closefd=False),
        os.fdopen(2, "w", closefd=False),
    )
    sys.exit(function(*args))


class Launched:
    """One process per environment, each running `function(*args)`; output goes to one file per process."""

    def __init__(
        self, folder: Path, environments: Iterable[dict[str, str]], function: Callable, *args: Any
    ) -> None:
        self.processes: list[Any] = []
        self.outputs: list[Path] = []
        for environment in environments:
            output = folder / f"output-{len(list(folder.glob('output-*')))}"
            output.touch()
            process = _context.Process(target=_be, args=(function, args, environment, str(output)))
            process.start()
            self.processes.append(process)
            self.outputs.append(output)

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def end(self) -> list[int | None]:
        """The exit codes of all, -n after signal n; None for one that hangs."""
        pending = {process.sentinel for process in self.processes}
        while pending:
            ended = wait(list(pending), HANG_SECONDS)
            if not ended:
                break
            pending -= set(ended)  # type: ignore[arg-type]
        for process in self.processes:
            process.join(0)
        return [process.exitcode for process in self.processes]

    def said(self, number: int) -> str:
        """What process `number` has printed so far."""
        return self.outputs[number].read_text()

    @property
    def all_said(self) -> str:
        """What all processes have printed so far."""
        return "".join(self.said(number) for number in range(len(self.outputs)))


def torchrun_environments(world_size: int) -> list[dict[str, str]]:
    """What torchrun sets, for each of `world_size` ranks on this machine."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for port in [str(free_port())]
        for rank in range(world_size)
    ]


_held: list[socket.socket] = []
"""Ports that were given out: no process draws them again before somebody listens there."""


def free_port(wanted: int = 0) -> int:
    """A port that nobody listens on, for a store; with `wanted` that one.

    Raises:
        OSError: somebody listens on the wanted one.
    """
    holder = socket.socket()
    # Who sets this too, as stores do, may listen beside a socket that is bound and does not listen.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", wanted))
    _held.append(holder)
    return holder.getsockname()[1]
