"""Copies of a run's checkpoints at a second place: anything that fsspec writes (s3://, gs://, a disk).

An object store has no rename. There a checkpoint exists by its `manifest.json`, which is written last and
removed first; sizes and checksums in it tell whether the rest is whole, as on a disk.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from shardclip.errors import UserError
from shardclip.training.checkpoint.storage import MANIFEST, fault, publish, published

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteConfig:
    """A second place for checkpoints."""

    remote_sync: str | None = None
    """Copy checkpoints in the background to this folder (s3://BUCKET/RUN, or what else fsspec writes)."""
    remote_sync_patience: float = 300.0
    """Seconds that the end of a run waits for copies that are not finished."""


class RemoteFolder:
    """Checkpoints under a URL.

    Raises:
        UserError: there is no driver for the URL's protocol.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        try:
            self._fs, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url}: {error}") from None

    def published(self) -> list[str]:
        """Names of the checkpoints there, oldest first."""
        self._fs.invalidate_cache()
        found = self._fs.glob(f"{self._root}/samples-*/{MANIFEST}")
        return sorted(str(path).split("/")[-2] for path in found)

    def put(self, checkpoint: Path) -> None:
        """Copy one that is published here; it is published there when this returns."""
        target = f"{self._root}/{checkpoint.name}"
        self._fs.makedirs(target, exist_ok=True)
        files = sorted(checkpoint.iterdir(), key=lambda path: path.name == MANIFEST)
        for file in files:
            self._fs.put_file(str(file), f"{target}/{file.name}")

    def get(self, name: str, folder: Path) -> Path:
        """Copy one from there into a run's checkpoint folder, checked, published by a rename.

        Raises:
            UserError: it is not there, or not whole.
        """
        source, partial = f"{self._root}/{name}", folder / f"tmp-{name}-fetched"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            manifest = json.loads(self._fs.cat_file(f"{source}/{MANIFEST}"))
            for file in [*manifest["files"], MANIFEST]:
                self._fs.get_file(f"{source}/{file}", str(partial / file))
        except (OSError, ValueError, KeyError) as error:
            shutil.rmtree(partial)
            raise UserError(f"{self.url}/{name}: cannot be fetched ({error})") from error
        if (found := fault(partial)) is not None:
            shutil.rmtree(partial)
            raise UserError(f"{self.url}/{name}: not whole ({found})")
        publish(partial, folder / name)
        return folder / name

    def begun(self) -> set[str]:
        """Names of all there, those included that are not, or no longer, whole."""
        if not self._fs.exists(self._root):
            return set()
        names = {str(path).rstrip("/").split("/")[-1] for path in self._fs.ls(self._root, detail=False)}
        return {name for name in names if name.startswith("samples-")}

    def remove(self, name: str) -> None:
        """Remove one there, its manifest first."""
        if self._fs.exists(manifest := f"{self._root}/{name}/{MANIFEST}"):
            self._fs.rm_file(manifest)
        self._fs.rm(f"{self._root}/{name}", recursive=True)


def fetch_newest(remote: RemoteFolder, folder: Path) -> Path | None:
    """Bring the newest whole checkpoint that is newer than those in `folder`; None where there is none.

    One that cannot be fetched whole is named in a warning and passed over.
    """
    here = {path.name for path in published(folder)}
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
        self._folder, self._remote = folder, remote
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
        here = published(self._folder)
        self._seen |= {path.name for path in here}
        there = self._remote.published()
        for path in here:
            if path.name not in there:
                self._remote.put(path)
        gone = self._seen - {path.name for path in published(self._folder)}
        for name in sorted(gone & self._remote.begun()):
            self._remote.remove(name)
