"""The checkpoints of a run: save, find, load."""

from __future__ import annotations

import logging
import shutil
import warnings
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
from shardclip.training.checkpoint.open_clip import load_open_clip
from shardclip.training.checkpoint.remote import Mirror, RemoteConfig, RemoteFolder, fetch_newest
from shardclip.training.checkpoint.snapshot import Snapshot
from shardclip.training.checkpoint.state import TrainState, load_targets, take_targets, to_plain, to_tensors
from shardclip.training.checkpoint.storage import (
    PublishingWriter,
    SafeReader,
    checkpoint_name,
    clear_unfinished,
    fault,
    fill,
    published,
    read_state,
    reason,
    samples_of,
)

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
        folder: Path,
        config: CheckpointConfig,
        processes: Ranks,
        remote: RemoteConfig | None = None,
    ) -> None:
        self.folder, self.config = Path(folder), config
        self.rank, self.world_size = processes.rank, processes.world_size
        self._group = self._own_group()
        self._snapshot = Snapshot()
        self._writing = ThreadPoolExecutor(1, "checkpoint")
        self._versions = {package: version(package) for package in _PACKAGES}
        self._in_flight: tuple[Future[Any], Path, Path] | None = None
        self._attempts = self._failures = 0
        self._newest: int | None = None
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in clear_unfinished(self.folder):
                _log.info("%s was not finished: removed", name)
        self._remote = remote or RemoteConfig()
        self._mirror: Mirror | None = None
        self._barrier()
        if self.rank == 0 and self._remote.remote_sync is not None:
            self._mirror = Mirror(self.folder, RemoteFolder(self._remote.remote_sync))
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
        final = self.folder / checkpoint_name(samples_seen)
        self._attempts += 1
        partial = self.folder / f"tmp-{final.name}-{self._attempts}"
        described = to_plain(state) | {
            "format": 1,
            "samples_seen": samples_seen,
            "world_size": self.world_size,
            "versions": self._versions,
        }
        writer = PublishingWriter(partial, final, described, self._after_publish)
        copies = self._snapshot.take(to_tensors(state, self.rank))
        # Not `dcp.async_save`: it walks through all entries once more while training stands still.
        future = self._writing.submit(
            dcp.save,
            copies,
            storage_writer=writer,
            process_group=self._group,
            no_dist=self._group is None,
        )
        self._in_flight, self._newest = (future, partial, final), samples_seen
        if not self.config.async_save:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if there is one, and report its failure.

        Raises:
            UserError: it failed, and so did the one before it.
        """
        if self._in_flight is None:
            return
        (future, partial, final), self._in_flight = self._in_flight, None
        try:
            future.result()
            self._failures = 0
        except (Exception, CheckpointException) as error:
            self._failures, self._newest = self._failures + 1, None
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            message = f"{final.name} could not be saved: {reason(error)}"
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

    def latest(self) -> Path | None:
        """The newest whole checkpoint of this run, the same on all ranks, or None.

        A damaged one (sizes and checksums are compared) is named in a warning and passed over.
        """
        candidates = self._from_rank_0(published(self.folder) if self.rank == 0 else None)
        for path in reversed(candidates):
            found = self._first(fault(path, self.rank, self.world_size))
            if found is None:
                return path
            if self.rank == 0:
                _log.warning("%s is damaged (%s): falling back to the one before it", path, found)
        return None

    def to_resume(self) -> Path | None:
        """The checkpoint that `--resume` asks for; None where it asks for none, or for the latest of none.

        Raises:
            UserError: the path is neither a whole checkpoint nor a file.
        """
        if self.config.resume is None:
            return None
        if self.config.resume == "latest":
            self._fetch(self._remote.remote_sync, newest=True)
            return self.latest()
        if "://" in self.config.resume:
            self._fetch(self.config.resume, newest=False)
            return self.folder / self.config.resume.rstrip("/").rpartition("/")[2]
        path = Path(self.config.resume)
        if path.is_file():
            return path
        found = self._first(fault(path, self.rank, self.world_size))
        if found is not None:
            raise UserError(f"--resume {path}: not a whole checkpoint ({found})")
        return path

    def load(self, path: Path, state: TrainState) -> None:
        """Fill the state from a checkpoint, whatever engine and number of ranks it was saved under.

        From a file of open_clip's, weights and moments; the state's progress stays as it is.

        Where the state's progress and the checkpoint both have a `config`, what decides the learning must be
        the same in both, unless `override` says that it is changed on purpose; the state's stays.

        Raises:
            UserError: it is of another model, holds something that is not a tensor, or has other settings.
        """
        if path.is_file():
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
        if path.parent == self.folder:
            self._newest = plain["samples_seen"]
        later = [other.name for other in published(self.folder) if samples_of(other) > plain["samples_seen"]]
        if later and self.rank == 0:
            _log.warning("%s holds later checkpoints (%s), which stay", self.folder, ", ".join(later))

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

    def _fetch(self, url: str | None, newest: bool) -> None:
        """On rank 0, bring a remote checkpoint into this run's folder; all ranks share the outcome."""
        failure = None
        if self.rank == 0 and url is not None:
            try:
                if newest:
                    fetch_newest(RemoteFolder(url), self.folder)
                else:
                    parent, _, name = url.rstrip("/").rpartition("/")
                    RemoteFolder(parent).get(name, self.folder)
            except (UserError, OSError) as error:
                failure = str(error)
        if (found := self._first(failure)) is not None:
            raise UserError(found)

    def _after_publish(self) -> None:
        self._prune()
        if self._mirror is not None:
            self._mirror.update()

    def _prune(self) -> None:
        """On rank 0, once a checkpoint is published. Nothing here makes that save a failure."""
        try:
            for replaced in self.folder.glob("tmp-*-replaced"):
                shutil.rmtree(replaced)
            saved = [samples_of(path) for path in published(self.folder)]
            for samples in to_prune(saved, self.config.keep_last, self.config.keep_every):
                # Renamed first: a kill in the middle leaves no folder that looks like a whole checkpoint.
                path = self.folder / checkpoint_name(samples)
                shutil.rmtree(path.rename(path.with_name(f"tmp-{path.name}-pruned")))
        except OSError as error:
            _log.warning("an old checkpoint could not be removed: %s", error)

    def _own_group(self) -> dist.ProcessGroup | None:
        """A gloo group of its own: a save runs beside training, and must not mix its collectives with it."""
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
            assert isinstance(group, dist.ProcessGroup)
            return group
        # Not `catch_warnings`: the save that warns runs in another thread.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        return None

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    def _from_rank_0(self, value: Any) -> Any:
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _first(self, value: T | None) -> T | None:
        """The first value that is not None, over all ranks."""
        values: list[T | None] = [value]
        if self._group is not None:
            values = [None] * self.world_size
            dist.all_gather_object(values, value, group=self._group)
        return next((found for found in values if found is not None), None)
