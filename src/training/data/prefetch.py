"""Reading ahead of the step, in a thread, so that a stalled source does not keep a rank from being asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

from shardclip.training.data.batch import Batch

_LOOK_SECONDS = 0.2
"""How often a waiting rank looks whether it is asked to stop."""


class Prefetcher:
    """The batches of a loader, the next one read while the current one is trained on."""

    def __init__(self, batches: Iterable[Batch], stop_requested: Callable[[], bool]) -> None:
        self._batches = batches
        self._stop_requested = stop_requested
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)

    def next(self) -> Batch | None:
        """The next batch; None if a stop is asked for before it comes.

        Raises:
            Exception: what the loader raised.
        """
        if not self._thread.is_alive() and self._ready.empty():
            self._thread.start()
        while True:
            try:
                item = self._ready.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if self._stop_requested():
                    return None
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def _read(self) -> None:
        try:
            for batch in self._batches:
                self._ready.put(batch)
        except BaseException as error:
            self._ready.put(error)
