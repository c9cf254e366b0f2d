"""How far a long evaluation is, for people who wait."""

from __future__ import annotations

import logging
import time

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """A log line every quarter of a minute; nothing for what is done sooner."""

    def __init__(self, what: str, total: int | None, *, is_primary: bool) -> None:
        """Begin to count.

        Args:
            what: what is counted, for the line.
            total: how many there are; None if that is not known.
            is_primary: whether this rank speaks.
        """
        self._what, self._total, self._speaks = what, total, is_primary
        self._done, self._last_line = 0, time.monotonic()

    def advance(self) -> None:
        """Count one more."""
        self._done += 1
        if self._speaks and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            of_all = "" if self._total is None else f" of {self._total:,}"
            _log.info("%s: %s%s", self._what, f"{self._done:,}", of_all)
