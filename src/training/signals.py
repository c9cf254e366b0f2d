"""A wish to stop: SIGTERM, SIGUSR1 or SIGINT to any one rank becomes an agreed stop of all.

Python runs a signal's handler only when the main thread comes back to the interpreter, and a rank that
waits in a collective does not. So a thread reads the signal's number from the wake-up pipe at any time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

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

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds` or until a stop is asked for; whether it is."""
        return self._event.wait(seconds)


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Turn the stop signals into `stop.request` while the context lasts (main thread only).

    A second SIGINT ends the process at once. Forked children (loader workers) do not take part: there SIGTERM
    kills as ever and the other two are ignored, because a whole process group may be signalled.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    main_process = os.getpid()

    def noted(number: int, frame: FrameType | None) -> None:
        """Stands in for the default action; the thread does the work."""

    def listen() -> None:
        while data := os.read(read_end, 1):
            number = data[0]
            if number == signal.SIGINT and stop.requested and stop.reason.startswith("SIGINT"):
                _leave_at_once()
            if number in STOP_SIGNALS:
                stop.request(signal.Signals(number).name)

    def leave_to_parent() -> None:
        if _active and os.getppid() == main_process:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            ignore_stop_signals_but_term()

    previous = {number: signal.signal(number, noted) for number in STOP_SIGNALS}
    previous_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=leave_to_parent)
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
        os.close(write_end)
        listener.join()
        os.close(read_end)


def ignore_stop_signals_but_term() -> None:
    """For loader workers that were not forked from the rank: a signal to the group must not end them."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave_at_once() -> NoReturn:
    os._exit(128 + signal.SIGINT)
