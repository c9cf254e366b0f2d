"""Where the processes of a launch meet: one store for each start, however often a launcher starts again."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist

from shardclip.errors import UserError
from shardclip.training.environment import LaunchEnvironment


def join_store(launch: LaunchEnvironment, minutes: float) -> dist.Store:
    """The store of this start, once all ranks have come; they are waited for so many minutes.

    Raises:
        UserError: not all came.
    """
    timeout = timedelta(minutes=minutes)
    try:
        store, _, _ = next(
            dist.rendezvous(launch.rendezvous, launch.rank, launch.world_size, timeout=timeout)
        )
        store.set_timeout(timeout)
        number = _number_of_start(store, launch.rank, launch.world_size, timeout)
    except (dist.DistError, ValueError) as error:
        raise UserError(
            f"Rank {launch.rank} of {launch.world_size} ({launch.source}, host {launch.host}) waited "
            f"{minutes:g} minutes at {meeting_point(launch)} and not all ranks came. Were "
            f"{launch.world_size} processes started, and can they reach that address? "
            f"({str(error).splitlines()[0]})"
        ) from error
    return dist.PrefixStore(f"start/{number}", store)


def _number_of_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> int:
    """A number that the processes of this start share and those of no earlier one had; waits for all of them.

    The agent of torchrun keeps its store when it starts the processes again, and with it all that the ended
    ones wrote: the failure that ended them, above all. Each process takes a ticket. That of rank 0 is the
    number, and it answers all tickets until all ranks have heard; those of processes that ended do no harm.

    Raises:
        DistError: not all came in time.
    """
    ticket = store.add("shardclip/tickets", 1)
    if rank != 0:
        store.wait([answer := f"shardclip/answer/{ticket}"], timeout)
        number = int(store.get(answer))
        if store.add(f"shardclip/heard/{number}", 1) == world_size - 1:
            store.set(f"shardclip/complete/{number}", "1")
        store.wait([f"shardclip/complete/{number}"], timeout)
        return number
    answered, deadline = 0, time.monotonic() + timeout.total_seconds()
    while not store.check([f"shardclip/complete/{ticket}"]):
        taken = store.add("shardclip/tickets", 0)
        for other in range(answered + 1, taken + 1):
            store.set(f"shardclip/answer/{other}", str(ticket))
        answered = taken
        if time.monotonic() > deadline:
            heard = store.add(f"shardclip/heard/{ticket}", 0)
            raise dist.DistError(f"{heard + 1} of {world_size} ranks came")
        time.sleep(0.02)
    return ticket


def meeting_point(launch: LaunchEnvironment) -> str:
    """The address of the store."""
    if launch.rendezvous.startswith("env://"):
        return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return launch.rendezvous
