"""`shardclip train --nproc 2 ...`: torchrun's own agent, without torchrun's command line in the way.

Our words never pass through torchrun's parser, where `--logs` or `--node` are ambiguous, and the workers'
exit codes and messages come out as they are. On several machines the same command is started once on each:

    shardclip train --nproc 8 --nnodes 2 --rdzv-endpoint node1:29400 ...
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from shardclip.errors import UserError, complain

T = TypeVar("T")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class LaunchConfig:
    """Processes to start on this machine. They see all other flags as they were given."""

    nproc: int | None = None
    """Start so many processes here, one a GPU; default: be the process (alone, of torchrun, or of srun)."""
    nnodes: int = 1
    """Machines that start this same command."""
    rdzv_endpoint: str | None = None
    """host:port on one of the machines, where they meet; needed for several."""
    rdzv_id: str = "shardclip"
    """Name of the run at the meeting point."""
    rdzv_minutes: float = 10.0
    """How long the machines wait for each other."""
    node_address: str | None = None
    """Address by which the other machines reach this one; default: its host name. The machine that has the
    address of --rdzv-endpoint keeps the meeting point."""
    max_restarts: int = 0
    """Start the processes again so often after a failure; a user's mistake and an agreed stop are final."""
    rank_logs: str | None = None
    """Folder for the output of all local ranks but the first, which keeps the terminal."""


def split_launch_flags(words: Sequence[str]) -> tuple[LaunchConfig, list[str]]:
    """The launch that `words` ask for, and the words that are left for the workers, untouched.

    Raises:
        UserError: a launch flag has no value, or a wrong one.
    """
    config, rest = take_flags(LaunchConfig, words)
    _check(config)
    return config, rest


def take_flags(kind: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    """The flags of a dataclass of plain fields that are among `words`, and the other words, untouched.

    Raises:
        UserError: a flag has no value, or a wrong one.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, prefix_chars="-")
    for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
        names = sorted({f"--{entry.name}", f"--{entry.name.replace('_', '-')}"})
        if entry.type == "bool":
            parser.add_argument(*names, dest=entry.name, action="store_true")
            continue
        type_of = {"int | None": int, "int": int, "float": float}.get(str(entry.type), str)
        parser.add_argument(*names, dest=entry.name, type=type_of, default=entry.default)
    known, rest = parser.parse_known_args(list(words))
    return kind(**vars(known)), rest


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _check(config: LaunchConfig) -> None:
    if config.nproc is None:
        if config.nnodes != 1:
            raise UserError("--nnodes needs --nproc: how many processes to start on this machine.")
        return
    if config.nproc < 1 or config.nnodes < 1 or config.max_restarts < 0:
        raise UserError("--nproc and --nnodes are at least 1, and --max-restarts is not negative.")
    if config.nnodes > 1 and config.rdzv_endpoint is None:
        raise UserError("--nnodes needs --rdzv-endpoint host:port, the same on all machines.")
    if "RANK" in os.environ:
        raise UserError(
            f"--nproc {config.nproc} would start processes, but a launcher has already started this one "
            f"(RANK={os.environ['RANK']}). Leave out --nproc, or start the command without torchrun."
        )


def launch(config: LaunchConfig, words: Sequence[str]) -> int:
    """Run `python -m shardclip WORDS` in `config.nproc` processes; the exit code of the run.

    SIGTERM, SIGUSR1 and SIGINT go on to the workers, which save and stop; nothing is cut short. The result is
    0, or the code of the first worker that failed (128 + n after signal n); what the workers had to say they
    have said.

    Raises:
        UserError: the other machines did not come to the meeting point.
    """
    return launch_command(config, [sys.executable, "-m", "shardclip", *words])


def launch_command(config: LaunchConfig, command: Sequence[str]) -> int:
    """`launch` for any command whose processes call `run_worker`."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    # The agent reports what it does to workers that have already told the user why they end.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="shardclip-launch-") as folder, _pass_signals(Path(folder)):
        os.environ["SHARDCLIP_LAUNCH_DIR"] = folder
        if (config.nproc or 1) > 1:
            # torchrun's default, for the same reason: the processes share the machine's cores.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        code = 0
        try:
            elastic_launch(_elastic_config(config), command[0])(*command[1:])
        except ChildFailedError as error:
            code = _code_of_first_failure(error)
        except RendezvousError as error:
            code = _code_without_meeting_point(config, bool(list(Path(folder).glob("worker-*"))), error)
        finally:
            del os.environ["SHARDCLIP_LAUNCH_DIR"]
        agreed = Path(folder, "exit-code")
        return int(agreed.read_text()) if agreed.exists() else code


def _code_without_meeting_point(config: LaunchConfig, workers_ran: bool, error: Exception) -> int:
    if workers_ran:
        complain(f"shardclip: the machine at {config.rdzv_endpoint} has ended the run")
        return 1
    raise UserError(
        f"The {config.nnodes} machines did not meet at {config.rdzv_endpoint} within {config.rdzv_minutes:g} "
        f"minutes. Was the command started on all of them, and can they reach it? ({error})"
    ) from error


def _elastic_config(config: LaunchConfig) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig

    assert config.nproc is not None
    quiet = dict.fromkeys(range(1, config.nproc), Std.ALL) if config.rank_logs else Std.NONE
    return ElasticConfig(
        min_nodes=config.nnodes,
        max_nodes=config.nnodes,
        nproc_per_node=config.nproc,
        run_id=config.rdzv_id,
        rdzv_backend="c10d",
        rdzv_endpoint=config.rdzv_endpoint or "localhost:0",
        rdzv_configs=_rendezvous_settings(config),
        local_addr=config.node_address,
        max_restarts=config.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=config.rank_logs, redirects=quiet),
        # Ours are passed on instead, see `_pass_signals`.
        signals_to_handle="SIGHUP,SIGQUIT",
    )


def _rendezvous_settings(config: LaunchConfig) -> dict[str, Any]:
    seconds = config.rdzv_minutes * 60
    # The second is how long a machine that comes early tries to connect.
    settings: dict[str, Any] = {"join_timeout": seconds, "read_timeout": max(60, int(seconds))}
    endpoint = (config.rdzv_endpoint or "").rpartition(":")[0]
    if config.node_address is not None and config.node_address == endpoint:
        # Torch compares the endpoint with the addresses of the host's name, which may all be other ones.
        settings["is_host"] = True
    return settings


def _code_of_first_failure(error: Any) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    name = signal.Signals(-failure.exitcode).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    complain(f"shardclip: the process of rank {rank} was ended by {name}{hint}")
    return 128 - failure.exitcode


@contextmanager
def _pass_signals(folder: Path) -> Iterator[None]:
    """Pass stop signals on to workers that have registered in `folder`, and leave word for those to come.

    The agent's own way is to end the workers with a time limit; theirs is to save first. Only the ranks are
    signalled, not their loader workers.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        (folder / "stop").write_text(signal.Signals(number).name)
        for registered in folder.glob("worker-*"):
            process = int(registered.name.removeprefix("worker-"))
            if _is_running_child(process):
                os.kill(process, number)

    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_running_child(process: int) -> bool:
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    except ChildProcessError:
        return False
