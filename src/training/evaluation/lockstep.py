"""Ranks that read unequal amounts of data, kept in step: the same number of forwards on every one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardclip.training.distributed import Processes, cpu_group
from shardclip.training.evaluation.progress import Progress
from shardclip.training.fetching import Stoppable
from shardclip.training.signals import Stopped

Item = TypeVar("Item")

_DONE, _MORE, _STOPPED, _FAILED = 0, 1, 2, 3


def lockstep(batches: Iterable[Item], processes: Processes, what: str) -> Iterator[Item | None]:
    """This rank's batches, then None for as long as another rank still has one.

    One tiny collective per batch makes every rank leave the loop after the same number of turns. It waits for
    a rank that reads slowly as long as `dist_patience_minutes`, so that what follows it (a forward of a
    sharded model) finds all ranks ready and never meets its own, shorter limit. Rank 0 logs how far it is.
    A wish to stop ends it on all ranks, also where the data of one has stalled.

    Raises:
        Stopped: some rank was asked to stop; on every rank.
        UserError, RemoteFailure: `batches` raised on some rank; the same error on every rank.
    """
    source = Stoppable(iter(batches), processes.stop)
    try:
        total = len(batches) if isinstance(batches, Sized) else None
        progress = Progress(f"{what}: batches on each rank", total, is_primary=processes.is_primary)
        yield from _turns(source, processes, what, progress)
    finally:
        source.close()


def _turns(
    source: Stoppable[Item], processes: Processes, what: str, progress: Progress
) -> Iterator[Item | None]:
    exhausted = False
    while True:
        batch: Item | None = None
        failure: Exception | None = None
        try:
            batch = None if exhausted else source.take()
        except StopIteration:
            exhausted = True
        except Exception as error:
            failure = error
        agreed = _highest(_state(batch, failure, processes), processes)
        if agreed == _STOPPED:
            raise Stopped(f"stopped while reading {what}")
        if agreed == _FAILED:
            with processes.together(f"reading {what}"):
                if failure is not None:
                    raise failure
        if agreed == _DONE:
            return
        yield batch
        progress.advance()


def _state(batch: object, failure: Exception | None, processes: Processes) -> int:
    if failure is not None:
        return _FAILED
    if processes.stop.requested:
        return _STOPPED
    return _DONE if batch is None else _MORE


def _highest(state: int, processes: Processes) -> int:
    if not processes.is_distributed:
        return state
    shared = torch.tensor(state)
    # A limit that a long evaluation does not meet.
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=cpu_group("lockstep", processes.patience))
    return int(shared)


def first_known(value: Any, processes: Processes) -> Any:
    """The value of the lowest rank whose value is not None; None if there is no such rank."""
    return next((known for known in processes.all_gather_object(value) if known is not None), None)
