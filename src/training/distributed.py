"""The processes of a run: who they are, how they meet, and what they can agree on without a GPU.

with start(DistributedConfig()) as processes:
    with processes.together("reading the shard list"):   # a failure on one rank is everybody's
        ...
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from shardclip.errors import UserError
from shardclip.training.environment import LaunchEnvironment, Source, read_environment
from shardclip.training.network import let_gloo_use_the_way_to
from shardclip.training.rendezvous import join_store, meeting_point
from shardclip.training.signals import StopRequest

GOODBYE = timedelta(seconds=5)
"""How long the ranks of a run that has failed wait for each other while they end."""


@dataclass(frozen=True)
class DistributedConfig:
    """How the processes of a run meet, and on which devices."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute: a GPU if there is one (auto), or cpu or cuda."""
    dist_url: str | None = None
    """Where the ranks meet (tcp://host:port, file:///path); default: what torchrun or SLURM say."""
    dist_backend: str | None = None
    """Backend of the collectives; default: nccl on GPUs (gloo beside it for CPU tensors), gloo on CPU."""
    dist_timeout_minutes: float = 10.0
    """How long a collective waits for a rank before the run fails."""
    dist_start_minutes: float = 5.0
    """How long the ranks wait for each other when the run starts."""
    dist_patience_minutes: float = 180.0
    """How long ranks wait at a barrier for one that is alive but busy (a long evaluation, a slow save)."""
    dist_lost_seconds: float = 60.0
    """A rank on another host that gives no sign of life for so long is taken for dead, and the run fails."""
    no_set_device_rank: bool = False
    """Use the one GPU that is visible instead of the one numbered by the local rank."""
    threads: int | None = None
    """Intra-op threads of each process; default: 1 for several processes on CPU, else torch's choice."""


class RemoteFailure(RuntimeError):
    """Work that the ranks did together failed on some of them; the message names them and holds the trace."""


@dataclass
class Position:
    """What this rank is doing, for the log of a failure."""

    phase: str = "start"
    """`start`, `train`, `evaluate`, `save`, ..."""
    step: int | None = None
    """The optimizer step, counted from 1 over the whole run."""
    keys: list[str] = field(default_factory=list)
    """The samples at hand ("shard.tar:key")."""

    def at(self, phase: str, step: int | None = None, keys: list[str] | None = None) -> None:
        """Note what begins now; `step` and `keys` that are not given are forgotten."""
        self.phase, self.step, self.keys = phase, step, keys or []

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        shown = ", ".join(self.keys[:4]) + (f" and {len(self.keys) - 4} more" if len(self.keys) > 4 else "")
        return f"phase {self.phase}{step}" + (f", samples {shown}" if shown else "")


@dataclass(frozen=True)
class Processes:
    """This process among all of the run. Every method is called by all ranks, in the same order."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    source: Source
    host: str
    store: dist.Store | None = None
    """Small messages that need no collective; None for one process."""
    patience: timedelta = timedelta(minutes=180)
    timeout: timedelta | None = None
    """How long a collective may take in groups that are made of these processes; None for torch's choice."""
    position: Position = field(default_factory=Position)
    stop: StopRequest = field(default_factory=StopRequest)
    report_files: list[Path] = field(default_factory=list)
    """Files that the report of a failure is added to, on the rank that reports it."""

    @property
    def is_primary(self) -> bool:
        """Whether this is rank 0, which alone writes logs and files (whichever host it is on)."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.world_size > 1

    def barrier(self) -> None:
        """Wait for all ranks, as long as `dist_patience_minutes`: not bounded by a collective's timeout."""
        self._meet(self._next_meeting())

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        """Rank `source`'s `obj` on every rank (picklable; any size that fits host memory)."""
        if not self.is_distributed:
            return obj
        holder = [obj if self.rank == source else None]
        dist.broadcast_object_list(holder, src=source)
        return holder[0]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The `obj` of every rank, in rank order, on every rank."""
        if not self.is_distributed:
            return [obj]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, obj)
        return gathered

    def stop_agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all. A reduction of one integer on CPU."""
        if not self.is_distributed:
            return self.stop.requested
        flag = torch.tensor(self.stop.flag())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag:
            self.stop.request("another rank")
        return bool(flag)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Work that may fail on some ranks alone: then every rank leaves with the same error.

        The outcome is exchanged through the store, so the work may take ranks differently long. It must not
        hold a collective that a failed rank would not reach.

        Raises:
            UserError: on all ranks, if every failure was a `UserError`; names the ranks unless all failed.
            RemoteFailure: on all ranks, for any other exception; holds the first failed rank's trace.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if not self.is_distributed:
            if failure is not None:
                raise failure
            return
        failures = self._exchange_failures(failure)
        if failures:
            raise _common_error(what, failures, self.world_size) from failure

    def _next_meeting(self) -> str:
        return f"meeting/{next(_MEETINGS)}"

    def _meet(self, key: str) -> None:
        if self.store is None:
            return
        if self.store.add(f"{key}/arrived", 1) == self.world_size:
            self.store.set(f"{key}/complete", "1")
        self.store.wait([f"{key}/complete"], self.patience)

    def _exchange_failures(self, failure: Exception | None) -> list[_Failure]:
        assert self.store is not None
        key = self._next_meeting()
        if failure is not None:
            report = _Failure(self.rank, self.host, isinstance(failure, UserError), _tell(failure))
            self.store.set(
                f"{key}/failure/{self.store.add(f'{key}/failures', 1)}", json.dumps(asdict(report))
            )
        self._meet(key)
        count = self.store.add(f"{key}/failures", 0)
        reports = [self.store.get(f"{key}/failure/{number}") for number in range(1, count + 1)]
        return sorted((_Failure(**json.loads(report)) for report in reports), key=lambda report: report.rank)


_MEETINGS = itertools.count()
"""Numbers every meeting of this process: equal on all ranks, since all have the same meetings."""


@dataclass(frozen=True)
class _Failure:
    rank: int
    host: str
    is_user_error: bool
    text: str


def _tell(failure: Exception) -> str:
    if isinstance(failure, UserError):
        return str(failure)
    return "".join(traceback.format_exception(failure)).rstrip()


def _common_error(what: str, failures: list[_Failure], world_size: int) -> Exception:
    grave = [failure for failure in failures if not failure.is_user_error]
    first = (grave or failures)[0]
    same = [failure for failure in failures if failure.text == first.text]
    ranks = ", ".join(str(failure.rank) for failure in (grave or same)[:8])
    if grave:
        return RemoteFailure(f"{what} failed on rank {ranks} (host {first.host}):\n{first.text}")
    if len(same) == world_size:
        return UserError(first.text)
    return UserError(f"{first.text}\n(while {what}, on rank {ranks} of {world_size}, host {first.host})")


def current(device: torch.device | None = None) -> Processes:
    """The processes of a group that somebody else has made (tests, a notebook); without a group, one."""
    device = device or torch.device("cpu")
    if not (dist.is_available() and dist.is_initialized()):
        return Processes(0, 1, 0, 1, device, "single", read_environment({}).host)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("shardclip", dist.distributed_c10d._get_default_store())
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    host = read_environment({}).host
    return Processes(rank, world_size, local_rank, local_world_size, device, "torchrun", host, store)


def cpu_group(purpose: str, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks, so that its collectives mix with those of no other purpose. It lasts as long
    as the processes do; collective when it is asked for first."""
    return _cpu_group(dist.group.WORLD, purpose, timeout)


@functools.cache
def _cpu_group(world: dist.ProcessGroup, purpose: str, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc=purpose)
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def start(config: DistributedConfig, stop: StopRequest | None = None) -> Iterator[Processes]:
    """Join the other processes of the launch, for as long as the context lasts.

    Rank 0 prints which launcher's variables were used and which ranks are on which host.

    Raises:
        UserError: the environment is contradictory, the other ranks do not come, or there is no such device.
    """
    launch = read_environment(os.environ, config.dist_url)
    store = join_store(launch, config.dist_start_minutes) if launch.world_size > 1 else None
    processes = Processes(
        launch.rank,
        launch.world_size,
        launch.local_rank,
        launch.local_world_size,
        torch.device("cpu"),
        launch.source,
        launch.host,
        None if store is None else dist.PrefixStore("shardclip", store.clone()),
        timedelta(minutes=config.dist_patience_minutes),
        timedelta(minutes=config.dist_timeout_minutes),
        stop=stop or StopRequest(),
    )
    try:
        with processes.together("choosing a device"):
            processes = replace(processes, device=choose_device(config, launch))
    except (UserError, RemoteFailure):
        if store is not None:
            with suppress(dist.DistError):
                _leave(processes, store, GOODBYE)
        raise
    _set_threads(config, processes)
    if store is not None:
        if launch.local_world_size < launch.world_size and (host := urlparse(meeting_point(launch)).hostname):
            let_gloo_use_the_way_to(host)
        dist.init_process_group(
            _backend(config, processes.device),
            store=dist.PrefixStore("group", store),
            rank=processes.rank,
            world_size=processes.world_size,
            timeout=processes.timeout,
        )
    _introduce(processes, launch.note)
    try:
        yield processes
        processes.barrier()
    finally:
        if store is not None:
            dist.destroy_process_group()
    if store is not None:
        _leave(processes, store, processes.patience)


def _leave(processes: Processes, store: dist.Store, patience: timedelta) -> None:
    """Rank 0 may host the store, so it goes last; the others' final `set` asks for no answer."""
    if processes.is_primary:
        store.wait(["shardclip/all_left"], patience)
    elif store.add("shardclip/left", 1) == processes.world_size - 1:
        store.set("shardclip/all_left", "1")


def choose_device(config: DistributedConfig, launch: LaunchEnvironment) -> torch.device:
    """The device of this rank, made the current one.

    Raises:
        UserError: there is no GPU, or none with the number of the local rank.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no GPU here; use --device cpu or --device auto.")
    index = 0 if config.no_set_device_rank else launch.local_rank
    if index >= torch.cuda.device_count():
        raise UserError(
            f"Local rank {launch.local_rank} on {launch.host} has no GPU of its own: "
            f"{torch.cuda.device_count()} visible. Start one process a GPU; where the launcher shows each "
            "process only its own GPU, add --no-set-device-rank."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    # It plans each new shape for a part of a second, and the number of packed captions is new in most steps.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def _backend(config: DistributedConfig, device: torch.device) -> str:
    if device.type == "cpu":
        return config.dist_backend or "gloo"
    chosen = config.dist_backend or "nccl"
    return chosen if ":" in chosen else f"cpu:gloo,{device.type}:{chosen}"


def _set_threads(config: DistributedConfig, processes: Processes) -> None:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif processes.device.type == "cpu" and processes.local_world_size > 1:
        # Two threads in each of two processes on two cores starve each other: slower than one.
        torch.set_num_threads(1)


def _introduce(processes: Processes, note: str) -> None:
    places = processes.all_gather_object((processes.host, processes.rank, str(processes.device)))
    if not processes.is_primary:
        return
    if note:
        print(note, flush=True)
    origin = {
        "single": "no launcher's variables",
        "torchrun": "RANK and WORLD_SIZE",
        "slurm": "the variables of srun's step",
    }
    plural = "es" if processes.is_distributed else ""
    print(f"{processes.world_size} process{plural}, from {origin[processes.source]}:", flush=True)
    by_host: dict[str, list[str]] = {}
    for host, rank, device in places:
        by_host.setdefault(host, []).append(f"{rank} ({device})")
    for host, ranks in by_host.items():
        print(f"  {host}: rank {', '.join(ranks)}", flush=True)
