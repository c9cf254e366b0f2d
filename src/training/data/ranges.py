"""Tar shards read in pieces: local files, and remote ones where the store serves ranges of bytes."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardclip.errors import UserError
from shardclip.training.data.sources import is_local, is_tar

OPEN_FILES = 64
ATTEMPTS = 3
ALWAYS_STREAMS = ("pipe:", "hf://", "ais://", "sftp://", "scp://", "ftps://")
SCAN_BYTES = 2**20
"""Bytes that a scan of remote headers fetches at once."""


def has_ranges(url: str) -> bool:
    """Whether a shard may be read in pieces; for http its server has the last word."""
    return is_tar(url) and not url.startswith(ALWAYS_STREAMS)


@contextmanager
def store_errors() -> Iterator[None]:
    """Clients of stores have errors of their own (no credentials, say): here they are `OSError`s."""
    try:
        yield
    except (OSError, ValueError, UserError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's system for a remote address (of which it keeps one a process), and the path in it.

    Raises:
        UserError: a package that the protocol needs is not installed.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{url} cannot be read: {error}.") from error


def open_seekable(url: str) -> IO[bytes]:
    """A shard to seek in.

    Raises:
        OSError: it cannot be opened.
        UserError: the server serves whole files only.
    """
    if is_local(url):
        return open(url, "rb")
    with store_errors():
        system, path = file_system(url)
        file = system.open(path, "rb", block_size=SCAN_BYTES, cache_type="readahead")
    try:
        for offset in (1, 0):
            file.seek(offset)
            file.read(1)
        file.seek(0)
    except ValueError as error:
        raise UserError(
            f"the server of {url} sends whole files only. Evaluation and `shardclip doctor` read pieces: "
            "copy the shards to this machine."
        ) from error
    return file


def fingerprint(url: str) -> NDArray[np.int64]:
    """Numbers that change when a shard does: size and time of a local file, what the store tells of others.

    Raises:
        OSError: it is not there.
    """
    if is_local(url):
        status = os.stat(url)
        return np.array([status.st_size, status.st_mtime_ns], dtype=np.int64)
    with store_errors():
        system, path = file_system(url)
        return np.array([system.size(path) or 0, system.checksum(path) % 2**63], dtype=np.int64)


class Pieces:
    """Reads pieces of shards; the files last used stay open."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_files": OrderedDict()}

    def read(self, url: str, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; fewer if the shard ends before.

        Raises:
            OSError: they cannot be read; of a remote shard after a few attempts.
        """
        if not size:
            return b""  # there is no range of no bytes: S3 would send the whole shard
        if is_local(url):
            return os.pread(self._file(url), size, offset)
        for attempt in range(ATTEMPTS):
            try:
                return _remote_piece(url, offset, size)
            except OSError:
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(2.0**attempt)
        raise AssertionError

    def _file(self, path: str) -> int:
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._files[path] = file
        if len(self._files) > OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return file


def _remote_piece(url: str, offset: int, size: int) -> bytes:
    with store_errors():
        system, path = file_system(url)
        return system.cat_file(path, start=offset, end=offset + size)
