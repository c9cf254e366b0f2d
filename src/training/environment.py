"""Which process of how many this is, read from what a launcher left in the environment, never guessed.

`RANK`, `WORLD_SIZE` and the rest (torchrun, `shardclip --nproc`) win. SLURM's variables count only inside a
step that `srun` started, with the step's own number of tasks: a shell of an allocation carries SLURM_NTASKS
and even SLURM_PROCID too, and whoever trusts them waits for peers that nobody started.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardclip.errors import UserError

Source = Literal["single", "torchrun", "slurm"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class LaunchEnvironment:
    """The place of this process among all, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    source: Source
    host: str
    """The node's name: SLURM's where it gives one, since two nodes of SLURM may share a host name."""
    rendezvous: str
    """URL of the meeting point for `torch.distributed.rendezvous`; empty for one process."""
    note: str = ""
    """What a reader of the log should know about how the source was chosen."""


def read_environment(environ: Mapping[str, str], dist_url: str | None = None) -> LaunchEnvironment:
    """The launch as `environ` tells it; `dist_url` replaces the meeting point that it would name.

    Raises:
        UserError: the variables contradict each other or one is missing.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(environ, dist_url)
    in_step = "SLURM_STEP_ID" in environ and "SLURM_STEP_NUM_TASKS" in environ
    if in_step and "SLURM_PTY_PORT" not in environ:
        return _from_slurm(environ, dist_url)
    note = ""
    if int(environ.get("SLURM_NTASKS", "1")) > 1:
        note = (
            f"SLURM_NTASKS={environ['SLURM_NTASKS']}, but srun did not start this process as a task "
            "of a step, so it runs alone. Start it with `srun` (one task a GPU) or `shardclip ... --nproc`."
        )
    return LaunchEnvironment(0, 1, 0, 1, "single", _host(environ), "", note)


def _from_torchrun(environ: Mapping[str, str], dist_url: str | None) -> LaunchEnvironment:
    needed = _TORCHRUN[:2] if environ.get("WORLD_SIZE") == "1" else _TORCHRUN[:3]
    if missing := [name for name in needed if name not in environ]:
        raise UserError(
            f"The environment has {' and '.join(name for name in _TORCHRUN if name in environ)} but not "
            f"{' and '.join(missing)}: a launcher sets all of them. Unset them to run one process, or start "
            "with `shardclip ... --nproc N` or `torchrun`."
        )
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK", 0)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size if "MASTER_ADDR" not in environ else 1)
    if not 0 <= rank < world_size or local_rank < 0:
        raise UserError(f"RANK={rank} and LOCAL_RANK={local_rank} do not fit WORLD_SIZE={world_size}.")
    rendezvous = dist_url or "env://"
    if rendezvous.startswith("env://") and world_size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                raise UserError(f"WORLD_SIZE={world_size}, but {name} is not set: where do the ranks meet?")
    return LaunchEnvironment(
        rank,
        world_size,
        local_rank,
        max(local_world_size, local_rank + 1),
        "torchrun",
        _host(environ),
        rendezvous if world_size > 1 else "",
    )


def _from_slurm(environ: Mapping[str, str], dist_url: str | None) -> LaunchEnvironment:
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    if not 0 <= rank < world_size:
        raise UserError(
            f"SLURM_PROCID={rank} is not one of the {world_size} tasks of step {environ['SLURM_STEP_ID']}."
        )
    tasks = expand_repeats(environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))
    node = _number(environ, "SLURM_NODEID", 0)
    return LaunchEnvironment(
        rank,
        world_size,
        local_rank,
        tasks[node] if node < len(tasks) else local_rank + 1,
        "slurm",
        _host(environ),
        (dist_url or _slurm_rendezvous(environ)) if world_size > 1 else "",
    )


def _slurm_rendezvous(environ: Mapping[str, str]) -> str:
    """Where task 0 listens: the step's first node, and a port that follows from job and step.

    The port stays under 32768, where the ports begin that the kernel hands out by itself.
    """
    port = environ.get("MASTER_PORT")
    if port is None:
        step = _number(environ, "SLURM_STEP_ID")
        port = str(10_000 + (_number(environ, "SLURM_JOB_ID") + 4_099 * step) % 20_000)
    address = environ.get("MASTER_ADDR")
    if address is None:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        if not nodes:
            raise UserError("SLURM names no nodes (SLURM_STEP_NODELIST); set MASTER_ADDR to task 0's host.")
        address = _address(first_host(nodes))
    return f"tcp://{address}:{port}"


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: `gpu[003-006,9],x1` gives `gpu003`."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    assert match is not None
    return "".join(part or "" for part in match.groups())


def expand_repeats(counts: str) -> list[int]:
    """Tasks of each node in SLURM's notation: `4(x2),3` gives [4, 4, 3]."""
    result: list[int] = []
    for part in counts.split(","):
        count, _, repeat = part.partition("(x")
        result += [int(count)] * int(repeat.rstrip(")") or 1)
    return result


def _address(node: str) -> str:
    """What to connect to for a node's name, which need not be a host's: then SLURM is asked."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    if shutil.which("scontrol"):
        shown = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", node], capture_output=True, text=True, timeout=60
        )
        if match := re.search(r"\bNodeAddr=(\S+)", shown.stdout):
            return match.group(1)
    raise UserError(f"The first node of the step, {node!r}, has no address here; set MASTER_ADDR to it.")


def _host(environ: Mapping[str, str]) -> str:
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"{name}={text!r} in the environment is not a number.") from None
