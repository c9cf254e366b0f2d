"""Copies of a run's checkpoints at a second place, made in the background."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from shardclip.errors import UserError
from shardclip.training.checkpoint.folders import LocalFolder, RemoteFolder

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteConfig:
    """Other places for checkpoints."""

    checkpoint_dir: str | None = None
    """Folder of the checkpoints; also a URL that fsspec writes (s3://BUCKET/RUN). Default: RUN/checkpoints"""
    remote_sync: str | None = None
    """Copy checkpoints in the background to this folder (s3://BUCKET/RUN, or what else fsspec writes)."""
    remote_sync_patience: float = 300.0
    """Seconds that the end of a run waits for copies that are not finished."""


def fetch_newest(remote: RemoteFolder, folder: Path) -> Path | None:
    """Bring the newest whole checkpoint that is newer than those in `folder`; None where there is none.

    One that cannot be fetched whole is named in a warning and passed over.
    """
    here = LocalFolder(folder).published()
    for name in reversed(remote.published()):
        if name in here:
            return None
        try:
            return remote.get(name, folder)
        except UserError as error:
            _log.warning("%s: falling back to the one before it", error)
    return None


class Mirror:
    """Keeps a remote folder like a local one, from a thread that the end of the program does not wait for.

    Checkpoints that are pruned here are removed there, if this mirror has seen them here. A copy that fails
    is reported and tried again with the next checkpoint.
    """

    def __init__(self, folder: Path, remote: RemoteFolder) -> None:
        self._local, self._remote = LocalFolder(folder), remote
        self._seen: set[str] = set()
        self._changed = threading.Condition()
        self._wanted = self._done = 0
        self._failed = self._closing = False
        # A daemon: a store that does not answer must not keep the run from ending.
        threading.Thread(target=self._work, name="remote-sync", daemon=True).start()

    def update(self) -> None:
        """The local folder has changed: copy it soon."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def close(self, patience: float) -> bool:
        """Wait at most `patience` seconds for what is not copied yet; whether all of it is."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            finished = self._changed.wait_for(lambda: self._done >= self._wanted, patience)
        if not finished:
            _log.warning("%s: not all is copied after %g s; the run ends without", self._remote.url, patience)
        return finished and not self._failed

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done < self._wanted or self._closing)
                if self._done >= self._wanted:
                    return
                wanted = self._wanted
            try:
                self._copy()
                self._failed = False
            except Exception as error:
                self._failed = True
                _log.warning("%s: not copied: %s: %s", self._remote.url, type(error).__name__, error)
            with self._changed:
                self._done = wanted
                self._changed.notify_all()

    def _copy(self) -> None:
        here = self._local.published()
        self._seen |= set(here)
        there = self._remote.published()
        for name in here:
            if name not in there:
                self._remote.put(self._local.path_of(name))
        gone = self._seen - set(self._local.published())
        for name in sorted(gone & self._remote.begun()):
            self._remote.remove(name)
