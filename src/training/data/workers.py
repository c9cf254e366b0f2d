"""Reading processes: how they start, what they hand over, and what is told when one is slow or dead."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardclip.errors import UserError
from shardclip.training.fetching import Fetched
from shardclip.training.heap import keep_freed_memory

NAME_BYTES = 512


@dataclass(frozen=True)
class Failure:
    """What a worker hands over instead of a batch when it cannot go on: a message for the user."""

    message: str


class NowReading:
    """Memory that readers share with the training process: the shard that each is reading."""

    def __init__(self, readers: int) -> None:
        self._names = torch.zeros(readers, NAME_BYTES, dtype=torch.uint8).share_memory_()

    def by(self, reader: int) -> Callable[[str], None]:
        """The function that notes what a reader turns to."""
        row = self._names[reader].numpy()
        last = ""

        def note(name: str) -> None:
            nonlocal last
            if name != last:
                last = name
                row[:] = np.frombuffer(name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"), dtype=np.uint8)

        return note

    def names(self) -> list[str]:
        """What each reader was reading last."""
        return [bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in self._names]


class PartReader(IterableDataset[Any]):
    """What runs in a reading process: the parts that it hands over, one after another."""

    now_reading: NowReading
    """Set by `read`."""

    def parts(self, number: int, readers: int, reading: Callable[[str], None]) -> Iterator[Any]:
        """The parts of reader `number` of so many, who says what it turns to by `reading(name)`."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, readers = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            keep_freed_memory()
        try:
            yield from self.parts(number, readers, self.now_reading.by(number))
        except UserError as error:
            yield Failure(str(error))


def read(reader: PartReader, workers: int, seconds: float, rank: int) -> Iterator[Any]:
    """What `reader` hands over, in turns over so many worker processes; with none, read by this process.

    Raises:
        UserError: what stopped a worker, if that is a mistake of the user; that nothing came for `seconds`,
            or that a worker died, and what was being read.
    """
    reader.now_reading = NowReading(max(1, workers))
    # DataLoader ends workers that are slow; for want of one, this process gives up waiting.
    timeout = seconds if workers else 0
    source: Fetched[Any] | None = None
    try:
        # A worker may die before the last one is started: torch says so wherever this thread is then.
        source = Fetched(iter(DataLoader(reader, batch_size=None, num_workers=workers, timeout=timeout)))
        while True:
            part = source.take(None if workers else seconds)
            if isinstance(part, Failure):
                raise UserError(part.message)
            yield part
    except StopIteration:
        return
    except (TimeoutError, RuntimeError) as error:
        raise _explained(error, reader.now_reading, seconds, rank) from error
    finally:
        if source is not None:
            source.close()


def _explained(error: Exception, now_reading: NowReading, seconds: float, rank: int) -> Exception:
    """The user's message of what is said of a slow or dead reader; other errors as they are."""
    slow = isinstance(error, TimeoutError) or "DataLoader timed out" in str(error)
    if not slow and ("DataLoader" not in str(error) or "worker process" in str(error)):
        return error
    reading = ", ".join(
        f"worker {number}: {name or 'nothing yet'}" for number, name in enumerate(now_reading.names())
    )
    if slow:
        return UserError(
            f"rank {rank} has waited {seconds:g} seconds (--data-timeout) for samples. "
            f"Its workers are reading: {reading}."
        )
    return UserError(
        f"a reading process of rank {rank} has died ({error}); often the memory of the machine or of "
        f"/dev/shm was used up, and fewer --workers help. The workers were reading: {reading}."
    )
