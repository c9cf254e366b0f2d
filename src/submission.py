"""`shardclip submit`: the batch file of a run, made from its settings, and given to SLURM.

shardclip submit --dry-run --nodes 4 --config clip-b32.yaml --fsdp     # prints it
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from shardclip.errors import UserError
from shardclip.launch import LaunchConfig, take_flags

BODY = Path("scripts/slurm/many_nodes.sbatch")
"""What a job does, relative to the folder that it is submitted from."""
SPARE_CORES = 2
"""Of each task, beside its loader workers."""


@dataclass(frozen=True)
class SubmitConfig:
    """What the job asks SLURM for. All other flags are those of `shardclip train`."""

    nodes: int = 1
    """Machines."""
    gpus_per_node: int = 8
    """GPUs of each, one task a GPU."""
    time: str = "24:00:00"
    """Time limit; the run saves before it, and goes on in the next turn."""
    lead_seconds: int = 300
    """How long before its end the job is told to save."""
    partition: str | None = None
    """Partition; default: the cluster's."""
    account: str | None = None
    """Whom the hours are counted to; default: the cluster's choice."""
    dry_run: bool = False
    """Print the batch file and leave it at that."""


def batch_file(config: SubmitConfig, name: str, workers: int, words: Sequence[str]) -> str:
    """The text of the batch file.

    Args:
        config: what to ask for.
        name: of the job.
        workers: loader workers of each task, which need cores.
        words: flags of `shardclip train`.
    """
    options = {
        "job-name": name,
        "nodes": config.nodes,
        "ntasks-per-node": config.gpus_per_node,
        "gpus-per-node": config.gpus_per_node,
        "cpus-per-task": workers + SPARE_CORES,
        "time": config.time,
        "partition": config.partition,
        "account": config.account,
        "output": "%x-%j.log",
        "signal": f"B:USR1@{config.lead_seconds}",
        "open-mode": "append",
    }
    asked = [f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None]
    lines = ["#!/usr/bin/env bash", *asked, "#SBATCH --requeue", f"exec bash {BODY} {shlex.join(words)}"]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """`shardclip submit [--dry-run] [--nodes N ...] FLAGS`; the flags of the run are checked in full.

    Raises:
        UserError: a flag is wrong, or there is no SLURM, or no batch files here.
    """
    from shardclip.training import config as configuration

    if "-h" in argv or "--help" in argv:
        tyro.cli(SubmitConfig, args=["--help"], prog="shardclip submit")
    config, words = take_flags(SubmitConfig, argv)
    if config.nodes < 1 or config.gpus_per_node < 1:
        raise UserError("--nodes and --gpus-per-node are at least 1.")
    launch, words = take_flags(LaunchConfig, words)
    idle = asdict(LaunchConfig())
    if given := [name for name, value in asdict(launch).items() if value != idle[name]]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(
            f"{flags}: srun starts the processes of a job, one a GPU. Leave this out, and say how many by "
            "--nodes and --gpus-per-node."
        )
    run = configuration.parse(words, beside=(SubmitConfig,))
    name = run.run.name or Path(run.model.model_config or run.model.model).stem.replace("/", "-")
    text = batch_file(config, name, run.data.workers, words)
    if config.dry_run:
        print(text, end="")
        return 0
    if not BODY.is_file():
        raise UserError(f"{BODY} is not here: submit from the folder that has shardclip's scripts")
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch on this machine; --dry-run prints the batch file")
    return subprocess.run(["sbatch"], input=text, text=True).returncode
