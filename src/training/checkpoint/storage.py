"""A checkpoint's files: written with checksums, published last, and read without unpickling.

    RUN/checkpoints/samples-000001280000/
        __0_0.distcp ...   tensors, one file a process (torch.distributed.checkpoint)
        .metadata          where each tensor lies (its index: written by DCP, read by `SafeReader`)
        state.json         everything that is not a tensor
        manifest.json      size and CRC-32 of each of these files

A checkpoint is named by the samples seen, the clock of a run: steps and epochs change their length with the
batch and the data, samples do not. What makes it exist is the folder's business (`folders.py`): a rename on a
disk, the manifest on a store that has no rename.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from upath import UPath

from shardclip.errors import UserError

AnyPath = Path | UPath
"""On a disk, or by a URL that fsspec opens."""
MANIFEST, STATE = "manifest.json", "state.json"
NAME = re.compile(r"samples-(\d{12})")


def checkpoint_name(samples_seen: int) -> str:
    """Folder name of the checkpoint taken after `samples_seen` samples; sorts by age."""
    return f"samples-{samples_seen:012d}"


def samples_of(path: AnyPath) -> int:
    """Samples seen by a checkpoint, from its folder's name."""
    match = NAME.fullmatch(path.name)
    if match is None:
        raise UserError(
            f"{path}: not a checkpoint; its folder's name is not of the form samples-000000000000"
        )
    return int(match[1])


class CheckpointFolder(Protocol):
    """What a writer must know of where checkpoints are kept."""

    def make_room(self, name: str) -> None:
        """Before anything is written."""

    def publish(self, partial: AnyPath, name: str, manifest: str) -> None:
        """Make what is written a checkpoint of that name, whole or not at all."""


def any_path(text: str) -> AnyPath:
    """What a user names: a path, or a URL."""
    return UPath(text) if "://" in text else Path(text)


def file_system(path: AnyPath) -> tuple[FileSystemBase, Any]:
    """DCP's way to the files of a folder, and the folder as it wants it."""
    if isinstance(path, Path):
        return FileSystem(), path
    reader = FsspecReader(str(path))
    return reader.fs, reader.path


@dataclass(frozen=True)
class FileCheck:
    """What a file must be: its size in bytes and its CRC-32."""

    size: int
    crc32: int

    @staticmethod
    def of(path: AnyPath) -> FileCheck:
        """Read a file and take both."""
        size = crc = 0
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                size, crc = size + len(block), zlib.crc32(block, crc)
        return FileCheck(size, crc)


def fault(path: AnyPath, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None: every file's size, and the content of one file in `parts`.

    Several processes share the reading: each is given its `part` of `parts`.
    """
    if isinstance(path, UPath):
        path.fs.invalidate_cache()
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for number, (name, check) in enumerate(sorted(manifest["files"].items())):
            size = (path / name).stat().st_size
            if size != check["size"]:
                return f"{name} has {size} bytes instead of {check['size']}"
            if number % parts == part and FileCheck.of(path / name).crc32 != check["crc32"]:
                return f"the content of {name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename or str(error)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


class _Counted:
    """A stream that keeps account of what is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._size, self._crc = stream, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, block: Any) -> int:
        """Write and count."""
        self._size, self._crc = self._size + memoryview(block).nbytes, zlib.crc32(block, self._crc)
        return self._stream.write(block)

    @property
    def check(self) -> FileCheck:
        """What the file must be."""
        return FileCheck(self._size, self._crc)


class PublishingWriter(FileSystemWriter):
    """DCP's writer, ending with a manifest of checksums and what makes the checkpoint exist in its folder.

    All overridden methods run inside DCP's own agreement: an exception on one process fails the save on all.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        partial: AnyPath,
        name: str,
        state: dict[str, Any],
        after_publish: Callable[[], None],
    ) -> None:
        # Copies ahead are for tensors on a GPU, and wait for what that computes. Ours are copies on the CPU.
        super().__init__(
            str(partial), overwrite=False, sync_files=isinstance(partial, Path), per_thread_copy_ahead=0
        )
        self.fs, self.path = file_system(partial)  # type: ignore[assignment]
        self._folder, self._partial, self._name = folder, partial, name
        self._after_publish = after_publish
        self._state = json.dumps(state, indent=1)
        self._checks: dict[str, FileCheck] = {}
        create_stream = self.fs.create_stream

        @contextmanager
        def counted_stream(path: Any, mode: str) -> Iterator[Any]:
            with create_stream(path, mode) as stream:
                counted = _Counted(stream)
                yield counted
                self._checks[str(path).rpartition("/")[2]] = counted.check

        self.fs.create_stream = counted_stream  # type: ignore[method-assign, assignment]

    def storage_meta(self) -> StorageMeta:
        """Without the folder's path, which says nothing after a rename."""
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing: rank 0 makes the folder."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, before anybody writes: make the folder."""
        self._folder.make_room(self._name)
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's tensors, and send the check of each file along with the results."""
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            # torch's zip writer complains about its unfinished file, and hides what the disk said before.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        for name, check in sorted(self._checks.items()):
            results.append(WriteResult(MetadataIndex(name), check.size, check))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, after all have written: index, state, manifest, and it is published."""
        everything = [result for of_rank in results for result in of_rank]
        checks = {r.index.fqn: r.storage_data for r in everything if isinstance(r.storage_data, FileCheck)}
        super().finish(metadata, [[r for r in everything if not isinstance(r.storage_data, FileCheck)]])
        checks[".metadata"] = self._checks[".metadata.tmp"]
        checks[STATE] = write_durably(self._partial / STATE, self._state)
        files = {name: vars(check) for name, check in sorted(checks.items())}
        self._folder.publish(self._partial, self._name, json.dumps({"files": files}, indent=1))
        self._after_publish()


def write_durably(path: AnyPath, text: str) -> FileCheck:
    """Write a file, wait until it is on the disk (a store has it once it is closed), say what it must be."""
    content = text.encode()
    with path.open("wb") as file:
        file.write(content)
        if isinstance(path, Path):
            file.flush()
            os.fsync(file.fileno())
    return FileCheck(len(content), zlib.crc32(content))


class _IndexUnpickler(pickle.Unpickler):
    """Reads DCP's index: its own five records, sizes and dtypes, nothing else."""

    _ALLOWED = frozenset(
        {
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
        }
    )
    _DTYPES = frozenset(
        {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._ALLOWED or (module == "torch" and name in self._DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"object {module}.{name}")


class SafeReader(FileSystemReader):
    """DCP's reader for untrusted files: its index is read by an allow-list, and only tensors are loaded.

    Tensors themselves DCP reads by `torch.load(weights_only=True)`.
    """

    def __init__(self, path: AnyPath) -> None:
        super().__init__(str(path))
        self.fs, self.path = file_system(path)  # type: ignore[assignment]
        self._place = path
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the checkpoint.

        Raises:
            UserError: it is missing, or holds anything but tensors.
        """
        if self._index is None:
            self._index = _read_index(self._place)
        return self._index

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shapes and dtypes of what the checkpoint holds, by key."""
        saved = self.read_metadata().state_dict_metadata
        return {key: kind for key, kind in saved.items() if isinstance(kind, TensorStorageMetadata)}


def fill(targets: dict[str, Tensor], reader: SafeReader, group: dist.ProcessGroup | None = None) -> None:
    """Read tensors in place, by the checkpoint's keys; of a sharded one, the own part. Collective in `group`.

    Raises:
        UserError: they cannot be read on some rank; all ranks get the same error.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(targets, storage_reader=reader, process_group=group, no_dist=group is None)  # type: ignore[arg-type]
        except CheckpointException as error:
            raise UserError(f"{reader.path}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """One line for a failed save or load: the first rank's own error, not the stack traces of all."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = sorted(error.failures.items())[0]
        return f"rank {rank}: {reason(cause)}"
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    # torch's refusal to unpickle names the object in one of its last lines.
    named = [line for line in lines if "Unsupported global" in line]
    return f"{type(error).__name__}: {(named or lines)[0]}"


def _read_index(path: AnyPath) -> Metadata:
    try:
        with (path / ".metadata").open("rb") as file:
            index = _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise UserError(f"{path}: not a whole checkpoint (.metadata is missing)") from None
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: refused, .metadata holds what no checkpoint of ours does: {error}"
        ) from None
    if not isinstance(index, Metadata):
        raise UserError(f"{path}: refused, .metadata holds a {type(index).__name__}")
    for place in index.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise UserError(f"{path}: refused, it points outside its folder ({place.relative_path})")
    for key, kind in index.state_dict_metadata.items():
        if not isinstance(kind, TensorStorageMetadata):
            place = next(place for at, place in index.storage_data.items() if at.fqn == key)
            raise UserError(f"{path}: refused, {key} is not a tensor but {_describe(path, place)}")
    return index


def _describe(path: AnyPath, place: Any) -> str:
    """What an entry that is no tensor would have been, found out without making it."""
    with (path / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        content = io.BytesIO(file.read(place.length))
    try:
        return f"a {type(torch.load(content, weights_only=True)).__name__}"
    except pickle.UnpicklingError as error:
        return f"an object ({reason(error)})"


def read_state(path: AnyPath) -> dict[str, Any]:
    """What a checkpoint holds besides tensors.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a whole checkpoint ({STATE}: {error})") from None
