"""Taking items from a source that may stall: with an end to patience, or until a stop is asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from shardclip.training.signals import StopRequest

T = TypeVar("T")


class Fetched(Generic[T]):
    """Takes items from a source by way of a thread, so that a source that stalls can be left.

    One item is fetched at a time, and only when it is asked for, so the source is never ahead. What it raises
    comes out of `take`, its end as StopIteration.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(target=self._fetch, name="fetching", daemon=True).start()

    def take(self, seconds: float | None = None) -> T | None:
        """The next item; None if the source was given up.

        Raises:
            TimeoutError: it did not come within `seconds`; the source must not be asked again.
        """
        self._wanted.put(True)
        try:
            item, error = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
        return item

    def close(self) -> None:
        """Ask the source for nothing more."""
        self._wanted.put(False)

    def _fetch(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a thread begins with the first GPU, which is another rank's
        while self._wanted.get():
            try:
                self._answers.put((next(self._items), None))
            except BaseException as error:
                self._answers.put((None, error))
                return

    def _give_up(self) -> None:
        self._answers.put((None, None))


class Stoppable(Fetched[T]):
    """Stops waiting for the source when a stop is asked for: from then on `take` gives None."""

    def __init__(self, items: Iterator[T], stop: StopRequest) -> None:
        super().__init__(items)
        self._stop = stop
        self._stopped = False
        stop.tell(self._give_up)

    def take(self, seconds: float | None = None) -> T | None:
        """The next item; None, without waiting for the source any longer, once a stop was asked for."""
        if self._stopped:
            return None
        item = super().take(seconds)
        self._stopped = item is None
        return item

    def close(self) -> None:
        """Ask the source for nothing more."""
        self._stop.forget(self._give_up)
        super().close()
