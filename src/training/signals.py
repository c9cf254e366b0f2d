"""A wish to stop: SIGTERM, SIGUSR1 or SIGINT to any one rank becomes an agreed stop of all.

Python runs a signal's handler only when the main thread comes back to the interpreter, and a rank that
waits in a collective does not. So a thread reads the signal's number from the wake-up pipe at any time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_active: list[StopRequest] = []

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""The end of a time limit, preemption (`--signal=USR1@120`), and Ctrl-C."""


class StopRequest:
    """Whether somebody asked for the run to end; on any rank, soon after one of them was asked.

    `requested` is this rank's knowledge and may differ between ranks for a moment, so what ranks do together
    follows `Processes.stop_agreed()` or a reduction that carries `flag()`, never `requested` alone.
    """

    def __init__(self) -> None:
        self.reason = ""
        """What asked, for the log: "SIGTERM", or "SIGTERM on rank 3"."""
        self._event = threading.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a request."""
        return self._event.is_set()

    def flag(self) -> int:
        """`requested` as 0 or 1, to be summed over ranks in a reduction that takes place anyway."""
        return int(self._event.is_set())

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason stays."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()
            for listener in list(self._listeners):
                listener()

    def tell(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a stop is asked for (from another thread), or now if it was; twice at most."""
        self._listeners.append(listener)
        if self._event.is_set():
            listener()

    def forget(self, listener: Callable[[], None]) -> None:
        """No longer call `listener`."""
        self._listeners.remove(listener)


class Stopped(Exception):
    """All ranks have agreed to leave what they were doing, because one of them was asked to stop."""


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Turn the stop signals into `stop.request` while the context lasts (main thread only).

    A second SIGINT ends the process at once. Forked children (loader workers) do not take part: there SIGTERM
    kills as ever and the other two are ignored, because a whole process group may be signalled.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def noted(number: int, frame: FrameType | None) -> None:
        """Stands in for the default action; the thread does the work."""

    def listen() -> None:
        # 0 ends it. Not the pipe's end: a loader worker that has stalled still holds the side that writes.
        while number := os.read(read_end, 1)[0]:
            if number == signal.SIGINT and stop.requested and stop.reason.startswith("SIGINT"):
                os._exit(128 + number)
            if number in STOP_SIGNALS:
                stop.request(signal.Signals(number).name)

    previous = {number: signal.signal(number, noted) for number in STOP_SIGNALS}
    previous_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, name="signals", daemon=True)
    _active.append(stop)
    listener.start()
    try:
        yield
    finally:
        _active.remove(stop)
        signal.set_wakeup_fd(previous_wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.write(write_end, b"\0")
        listener.join()
        os.close(write_end)
        os.close(read_end)


def leave_stopping_to_parent() -> None:
    """In a loader worker: signals to the whole process group must not end it, but its parent's SIGTERM does.

    Forked workers of a rank do this by themselves.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _after_fork_in_child() -> None:
    if _active:
        leave_stopping_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
