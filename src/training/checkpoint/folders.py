"""Where checkpoints are kept, and what makes one exist there.

On a disk it is written as `tmp-*` and renamed. An object store has no rename: there a checkpoint exists by
its `manifest.json`, which is written last and removed first, so that a folder without one is what a killed
save has left. Sizes and checksums in the manifest tell whether the rest is whole, in both.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fsspec.core import url_to_fs
from upath import UPath

from shardclip.errors import UserError
from shardclip.training.checkpoint.storage import MANIFEST, NAME, AnyPath, fault, write_durably


class Folder(Protocol):
    """A run's checkpoints, by name."""

    def published(self) -> list[str]:
        """Names of the checkpoints there, oldest first. Not checked: see `fault`."""

    def path_of(self, name: str) -> AnyPath:
        """Where a checkpoint of that name lies, or would."""

    def prepare(self) -> list[str]:
        """Make the folder and remove what a killed save left; the names that are gone."""

    def partial(self, name: str, attempt: int) -> AnyPath:
        """Where to write a new one."""

    def make_room(self, name: str) -> None:
        """What must happen on rank 0 before anything is written."""

    def publish(self, partial: AnyPath, name: str, manifest: str) -> None:
        """Make what is written a checkpoint, whole or not at all."""

    def discard(self, partial: AnyPath) -> None:
        """Remove what a failed save has left, as far as that can be done."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint; a kill in the middle leaves nothing that looks like a whole one."""


def open_folder(place: str | AnyPath) -> Folder:
    """The checkpoints in a folder, or under a URL.

    Raises:
        UserError: there is no driver for the URL's protocol.
    """
    return RemoteFolder(str(place)) if "://" in str(place) else LocalFolder(Path(str(place)))


def published(place: AnyPath) -> list[AnyPath]:
    """The checkpoints in a folder, oldest first. Not checked: see `fault`."""
    folder = open_folder(place)
    return [folder.path_of(name) for name in folder.published()]


class LocalFolder:
    """Checkpoints on a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def published(self) -> list[str]:
        """See `Folder`."""
        if not self.path.is_dir():
            return []
        return sorted(
            path.name for path in self.path.iterdir() if NAME.fullmatch(path.name) and path.is_dir()
        )

    def path_of(self, name: str) -> Path:
        """See `Folder`."""
        return self.path / name

    def prepare(self) -> list[str]:
        """See `Folder`; also put back what a killed save was about to replace."""
        self.path.mkdir(parents=True, exist_ok=True)
        for retired in self.path.glob("tmp-*-replaced"):
            match = NAME.search(retired.name)
            if match is not None and not (final := self.path / match[0]).exists():
                os.rename(retired, final)
        unfinished = sorted(self.path.glob("tmp-*"))
        for path in unfinished:
            shutil.rmtree(path)
        return [path.name for path in unfinished]

    def partial(self, name: str, attempt: int) -> Path:
        """See `Folder`."""
        return self.path / f"tmp-{name}-{attempt}"

    def make_room(self, name: str) -> None:
        """Nothing: a new one is written aside."""

    def publish(self, partial: AnyPath, name: str, manifest: str) -> None:
        """See `Folder`."""
        assert isinstance(partial, Path)
        write_durably(partial / MANIFEST, manifest)
        publish_by_rename(partial, self.path / name)
        for replaced in self.path.glob("tmp-*-replaced"):
            shutil.rmtree(replaced, ignore_errors=True)

    def discard(self, partial: AnyPath) -> None:
        """See `Folder`."""
        shutil.rmtree(str(partial), ignore_errors=True)

    def remove(self, name: str) -> None:
        """See `Folder`."""
        shutil.rmtree((self.path / name).rename(self.path / f"tmp-{name}-pruned"))


def publish_by_rename(partial: Path, final: Path) -> None:
    """Give a finished folder its name. One of that name from an earlier life of the run is replaced whole."""
    _sync(partial)
    if final.exists():
        os.rename(final, partial.with_name(f"{partial.name}-replaced"))
    os.rename(partial, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteFolder:
    """Checkpoints under a URL: anything that fsspec writes (s3://, gs://, a disk).

    Raises:
        UserError: there is no driver for the URL's protocol.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url}: {error}") from None

    def published(self) -> list[str]:
        """See `Folder`."""
        self._fs.invalidate_cache()
        found = self._fs.glob(f"{self._root}/samples-*/{MANIFEST}")
        return sorted(str(path).split("/")[-2] for path in found)

    def path_of(self, name: str) -> UPath:
        """See `Folder`."""
        return UPath(f"{self.url}/{name}")

    def prepare(self) -> list[str]:
        """See `Folder`."""
        unfinished = sorted(self.begun() - set(self.published()))
        for name in unfinished:
            self.remove(name)
        return unfinished

    def partial(self, name: str, attempt: int) -> UPath:
        """See `Folder`; its name from the start, since it has no manifest."""
        return self.path_of(name)

    def make_room(self, name: str) -> None:
        """Remove one of that name from an earlier life of the run: none is written into."""
        if name in self.begun():
            self.remove(name)

    def publish(self, partial: AnyPath, name: str, manifest: str) -> None:
        """See `Folder`."""
        self._fs.pipe_file(f"{self._root}/{name}/{MANIFEST}", manifest.encode())

    def discard(self, partial: AnyPath) -> None:
        """See `Folder`."""
        # Perhaps the save failed because the store is away; then the next start removes it.
        with suppress(OSError):
            self.make_room(partial.name)

    def remove(self, name: str) -> None:
        """See `Folder`."""
        if self._fs.exists(manifest := f"{self._root}/{name}/{MANIFEST}"):
            self._fs.rm_file(manifest)
        self._fs.rm(f"{self._root}/{name}", recursive=True)

    def begun(self) -> set[str]:
        """Names of all there, those included that are not, or no longer, whole."""
        self._fs.invalidate_cache()
        if not self._fs.exists(self._root):
            return set()
        names = {str(path).rstrip("/").split("/")[-1] for path in self._fs.ls(self._root, detail=False)}
        return {name for name in names if NAME.fullmatch(name)}

    def put(self, checkpoint: Path) -> None:
        """Copy one that is published on a disk; it is published here when this returns."""
        target = f"{self._root}/{checkpoint.name}"
        self._fs.makedirs(target, exist_ok=True)
        files = sorted(checkpoint.iterdir(), key=lambda path: path.name == MANIFEST)
        for file in files:
            self._fs.put_file(str(file), f"{target}/{file.name}")

    def get(self, name: str, folder: Path) -> Path:
        """Copy one from here into a folder on a disk, checked, published by a rename.

        Raises:
            UserError: it is not there, or not whole.
        """
        source, partial = f"{self._root}/{name}", folder / f"tmp-{name}-fetched"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            manifest: dict[str, Any] = json.loads(self._fs.cat_file(f"{source}/{MANIFEST}"))
            for file in [*manifest["files"], MANIFEST]:
                self._fs.get_file(f"{source}/{file}", str(partial / file))
        except (OSError, ValueError, KeyError) as error:
            shutil.rmtree(partial)
            raise UserError(f"{self.url}/{name}: cannot be fetched ({error})") from error
        if (found := fault(partial)) is not None:
            shutil.rmtree(partial)
            raise UserError(f"{self.url}/{name}: not whole ({found})")
        publish_by_rename(partial, folder / name)
        return folder / name
