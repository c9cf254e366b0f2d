"""The checkpoints of a run: save, find, load."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardclip.errors import UserError
from shardclip.training.checkpoint.config import CheckpointConfig, to_prune
from shardclip.training.checkpoint.conflicts import Settings, conflicts
from shardclip.training.checkpoint.folders import LocalFolder, RemoteFolder, open_folder
from shardclip.training.checkpoint.open_clip import load_open_clip, newest_of_open_clip
from shardclip.training.checkpoint.remote import Mirror, RemoteConfig, fetch_newest
from shardclip.training.checkpoint.snapshot import Snapshot
from shardclip.training.checkpoint.state import TrainState, load_targets, take_targets, to_plain, to_tensors
from shardclip.training.checkpoint.storage import (
    AnyPath,
    PublishingWriter,
    SafeReader,
    any_path,
    checkpoint_name,
    fault,
    fill,
    read_state,
    reason,
    samples_of,
)
from shardclip.training.distributed import cpu_group

_log = logging.getLogger(__name__)
_PACKAGES = ("shardclip", "torch", "open_clip_torch", "timm", "transformers")
T = TypeVar("T")


class Ranks(Protocol):
    """What is needed to know of the run's processes."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""


class Checkpoints:
    """Saves, finds and loads the checkpoints of one run. All methods are collective.

    A save that fails (a full disk) is reported and training goes on with the previous checkpoint; a second
    failure in a row is raised.
    """

    def __init__(
        self,
        folder: str | AnyPath,
        config: CheckpointConfig,
        processes: Ranks,
        remote: RemoteConfig | None = None,
    ) -> None:
        self.folder, self.config = open_folder(folder), config
        self.rank, self.world_size = processes.rank, processes.world_size
        self._group = self._own_group()
        self._snapshot = Snapshot()
        self._writing = ThreadPoolExecutor(1, "checkpoint")
        self._versions = {package: version(package) for package in _PACKAGES}
        self._in_flight: tuple[Future[Any], AnyPath, str] | None = None
        self._attempts = self._failures = 0
        self._newest: int | None = None
        self._remote = remote or RemoteConfig()
        self._mirror: Mirror | None = None
        self._prepare()
        if self.rank == 0 and self._remote.remote_sync is not None and isinstance(self.folder, LocalFolder):
            self._mirror = Mirror(self.folder.path, RemoteFolder(self._remote.remote_sync))
            self._mirror.update()

    def save(self, samples_seen: int, state: TrainState) -> None:
        """Save the state as it is now. Returns once it is copied (`async_save`) or once it is published.

        Nothing happens where the run's newest checkpoint is of just as many samples.

        Raises:
            UserError: this is the second save in a row that failed.
        """
        self.wait()
        if samples_seen == self._newest:
            return
        name = checkpoint_name(samples_seen)
        self._attempts += 1
        partial = self.folder.partial(name, self._attempts)
        described = to_plain(state) | {
            "format": 1,
            "samples_seen": samples_seen,
            "world_size": self.world_size,
            "versions": self._versions,
        }
        writer = PublishingWriter(self.folder, partial, name, described, self._after_publish)
        copies = self._snapshot.take(to_tensors(state, self.rank))
        # Not `dcp.async_save`: it walks through all entries once more while training stands still.
        future = self._writing.submit(
            dcp.save,
            copies,
            storage_writer=writer,
            process_group=self._group,
            no_dist=self._group is None,
        )
        self._in_flight, self._newest = (future, partial, name), samples_seen
        if not self.config.async_save:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if there is one, and report its failure.

        Raises:
            UserError: it failed, and so did the one before it.
        """
        if self._in_flight is None:
            return
        (future, partial, name), self._in_flight = self._in_flight, None
        try:
            future.result()
            self._failures = 0
        except (Exception, CheckpointException) as error:
            self._failures, self._newest = self._failures + 1, None
            if self.rank == 0:
                self.folder.discard(partial)
            message = f"{name} could not be saved: {reason(error)}"
            if self._failures > 1:
                raise UserError(f"{message}. The save before it failed too.") from error
            _log.error("%s. The previous checkpoint is kept, training goes on.", message)

    def close(self) -> None:
        """Wait for the last save.

        Raises:
            UserError: it failed.
        """
        self.wait()
        self._writing.shutdown()
        if self._mirror is not None:
            self._mirror.close(self._remote.remote_sync_patience)
        if self._failures:
            raise UserError("the last checkpoint could not be saved (see above); the one before it is kept")

    def latest(self) -> AnyPath | None:
        """The newest whole checkpoint of this run, the same on all ranks, or None.

        A damaged one (sizes and checksums are compared) is named in a warning and passed over.
        """
        candidates: list[str] = self._on_rank_0(self.folder.published)
        for path in map(self.folder.path_of, reversed(candidates)):
            found = self._first(fault(path, self.rank, self.world_size))
            if found is None:
                return path
            if self.rank == 0:
                _log.warning("%s is damaged (%s): falling back to the one before it", path, found)
        return None

    def to_resume(self) -> AnyPath | None:
        """The checkpoint that `--resume` asks for; None where it asks for none, or for the latest of none.

        Raises:
            UserError: the path is neither a whole checkpoint nor a file; or it asks for none, in a folder by
                URL that holds some; or for the latest, where there are open_clip's alone.
        """
        asked = self.config.resume
        if asked is None:
            if isinstance(self.folder, RemoteFolder) and (others := self._on_rank_0(self.folder.published)):
                raise UserError(
                    f"{self.folder.url} holds checkpoints of another run ({others[-1]}): give another "
                    "--checkpoint-dir, or go on with that run by --resume latest"
                )
            return None
        if asked == "latest":
            self._fetch_newest()
            newest = self.latest()
            if newest is None:
                self._refuse_open_clips()
            return newest
        path = any_path(asked)
        if isinstance(path, Path) and path.is_file():
            return path
        found = self._first(fault(path, self.rank, self.world_size))
        if found is not None:
            advice = "; a file of open_clip's is read from a disk" if path.suffix == ".pt" else ""
            raise UserError(f"--resume {path}: not a whole checkpoint ({found}){advice}")
        return path

    def load(self, path: AnyPath, state: TrainState) -> None:
        """Fill the state from a checkpoint, whatever engine and number of ranks it was saved under.

        From a file of open_clip's, weights and moments; the state's progress stays as it is.

        Where the state's progress and the checkpoint both have a `config`, what decides the learning must be
        the same in both, unless `override` says that it is changed on purpose; the state's stays.

        Raises:
            UserError: it is of another model, holds something that is not a tensor, or has other settings.
        """
        if isinstance(path, Path) and path.is_file():
            load_open_clip(path, state)
            return
        plain = read_state(path)
        config = self._check_config(plain, state)
        reader = SafeReader(path)
        targets = load_targets(state, reader.tensors(), self.rank)
        fill(targets, reader, self._group)
        take_targets(state, targets, plain, self.rank)
        if config is not None:
            state.progress["config"] = config
        if path == self.folder.path_of(path.name):
            self._newest = plain["samples_seen"]
        published = self._on_rank_0(self.folder.published)
        later = [name for name in published if name > checkpoint_name(plain["samples_seen"])]
        if later and self.rank == 0:
            _log.warning("%s: there are later checkpoints (%s), which stay", path, ", ".join(later))

    def _check_config(self, plain: dict[str, Any], state: TrainState) -> Settings | None:
        now, then = state.progress.get("config"), plain["progress"].get("config")
        if now is None or then is None:
            return now
        changed = conflicts(then, plain["world_size"], now, self.world_size)
        if changed and not self.config.override:
            lines = ["the checkpoint is of a run with other settings:", *(f"  {line}" for line in changed)]
            raise UserError("\n".join([*lines, "--override goes on with the new ones."]))
        for line in changed:
            _log.warning("changed on resuming: %s", line)
        return now

    def _prepare(self) -> None:
        removed = self._on_rank_0(self.folder.prepare)
        for name in removed if self.rank == 0 else ():
            _log.info("%s was not finished: removed", name)

    def _fetch_newest(self) -> None:
        """On rank 0, bring what only the second place has into this run's folder."""

        def fetch() -> None:
            if self._remote.remote_sync is not None and isinstance(self.folder, LocalFolder):
                fetch_newest(RemoteFolder(self._remote.remote_sync), self.folder.path)

        self._on_rank_0(fetch)

    def _refuse_open_clips(self) -> None:
        """A folder with open_clip's checkpoints is of a run to go on with, not of one to begin from scratch.

        Raises:
            UserError: there are some.
        """

        def newest() -> Path | None:
            return newest_of_open_clip(self.folder.path) if isinstance(self.folder, LocalFolder) else None

        theirs = self._on_rank_0(newest)
        if theirs is not None:
            raise UserError(
                f"--resume latest: {theirs.parent} holds no checkpoint of shardclip's, but of open_clip's "
                f"({theirs.name}). Give --resume {theirs} to start from its weights and moments, with steps "
                "and samples counted from 0, or another --name for a new run"
            )

    def _after_publish(self) -> None:
        self._prune()
        if self._mirror is not None:
            self._mirror.update()

    def _prune(self) -> None:
        """On rank 0, once a checkpoint is published. Nothing here makes that save a failure."""
        try:
            saved = [samples_of(self.folder.path_of(name)) for name in self.folder.published()]
            for samples in to_prune(saved, self.config.keep_last, self.config.keep_every):
                self.folder.remove(checkpoint_name(samples))
        except OSError as error:
            _log.warning("an old checkpoint could not be removed: %s", error)

    def _own_group(self) -> dist.ProcessGroup | None:
        """A save runs beside training, and must not mix its collectives with it."""
        if dist.is_initialized():
            return cpu_group("checkpoints", timedelta(hours=1))
        # Not `catch_warnings`: the save that warns runs in another thread.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        return None

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, on all ranks; what goes wrong there with files or a store, too.

        Raises:
            UserError: it went wrong.
        """
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = work()
            except (UserError, OSError) as error:
                box[1] = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if self._group is not None:
            dist.broadcast_object_list(box, src=0, group=self._group)
        if box[1] is not None:
            raise UserError(f"checkpoints: {box[1]}")
        return box[0]

    def _first(self, value: T | None) -> T | None:
        """The first value that is not None, over all ranks."""
        values: list[T | None] = [value]
        if self._group is not None:
            values = [None] * self.world_size
            dist.all_gather_object(values, value, group=self._group)
        return next((found for found in values if found is not None), None)
