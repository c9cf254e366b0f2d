"""Runs of the real command in which something happens to one rank at a known point."""

import os
import signal
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

from shardclip import cli
from shardclip.training.data.finite import FiniteReader
from shardclip.training.data.reader import Reader
from shardclip.training.distributed import Position

READERS = {"training": Reader, "validation": FiniteReader}


def strike(what: str, phase: str, step: int, victim: int = 1) -> None:
    """Where rank `victim` comes to `phase` of `step`, it gets the signal `what`, or meets an `error`."""
    note = Position.at

    def at(self: Position, now: str, step_now: int | None = None, keys: list[str] | None = None) -> None:
        note(self, now, step_now, keys)
        if int(os.environ["RANK"]) == victim and (now, step_now) == (phase, step):
            print("struck at", *self.keys, flush=True)
            if what == "error":
                raise ValueError("broken")
            os.kill(os.getpid(), signal.Signals[what])

    Position.at = at  # type: ignore[method-assign]


def stall(data: str, batches: int) -> None:
    """The `training` or `validation` data of rank 0 gives so many batches, and then nothing, for ever."""
    reader: Any = READERS[data]
    read = reader.__iter__

    def stalled(self: Any) -> Iterator[Any]:
        yield from islice(read(self), batches)
        threading.Event().wait()

    if os.environ["RANK"] == "0":
        reader.__iter__ = stalled


def disturbed(words: list[str], struck: tuple[str, str, int], stalled: tuple[str, int] | None = None) -> int:
    """`shardclip WORDS`, disturbed by `strike(*struck)` and `stall(*stalled)`."""
    strike(*struck)
    if stalled is not None:
        stall(*stalled)
    return cli.main(words)


def delayed(words: list[str], data: str, seconds: float) -> int:
    """`shardclip WORDS`; rank 0 waits so long for the first of its `training` or `validation` data."""
    reader: Any = READERS[data]
    read = reader.__iter__

    def late(self: Any) -> Iterator[Any]:
        threading.Event().wait(seconds)
        yield from read(self)

    if os.environ["RANK"] == "0":
        reader.__iter__ = late
    return cli.main(words)
