"""The command `shardclip`: one verb, then flags.

shardclip train --model ViT-B-32 --train-data 'shards/{000..099}.tar' --train-num-samples 1000000
shardclip train --nproc 8 --fsdp ...          # eight processes on this machine
torchrun --nproc-per-node 8 -m shardclip train --fsdp ...
srun shardclip train --fsdp ...               # one task per GPU
"""

import difflib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardclip.errors import UserError, complain

if TYPE_CHECKING:
    from shardclip.training.distributed import Processes

SPEAKER_SECONDS = 5.0
"""What the silent ones leave to the process that speaks for its host: torchrun ends all when one ends."""


@dataclass(frozen=True)
class Verb:
    """A subcommand: a function of the words after it that returns the exit code."""

    module: str
    function: str
    summary: str


VERBS = {
    "train": Verb("shardclip.cli", "train", "train a model"),
    "eval": Verb(
        "shardclip.training.evaluation.command", "main", "evaluate a saved run or an open_clip file"
    ),
    "plan": Verb("shardclip.training.planning", "main", "memory and traffic of a run before it is submitted"),
    "submit": Verb("shardclip.submission", "main", "give a run to SLURM, or print its batch file"),
    "index": Verb("shardclip.commands", "index", "count and index shards"),
    "export": Verb("shardclip.commands", "export", "write a checkpoint that open_clip opens"),
    "doctor": Verb("shardclip.training.data.doctor", "main", "what a run would trip over in its data"),
    "plot": Verb(
        "shardclip.training.plotting", "main", "draw loss, accuracy, throughput, scale and norms of runs"
    ),
    "compare": Verb("shardclip.training.comparison", "main", "a table and bars of the results of runs"),
}


def train(argv: Sequence[str]) -> int:
    """`shardclip train`: start the processes that `--nproc` asks for, or be one process of the run.

    Settings are checked in full before any process is started.
    """
    from shardclip.launch import launch, split_launch_flags
    from shardclip.training import config as configuration

    if "-h" in argv or "--help" in argv:
        configuration.show_help()
        return 0
    launch_config, words = split_launch_flags(argv)
    config, notes = configuration.parse_with_notes(words)
    if launch_config.nproc is not None:
        return launch(launch_config, ["train", *words])

    from shardclip.training import loop
    from shardclip.training.rehearsal import Rehearsal
    from shardclip.training.worker import run_worker

    rehearsal = Rehearsal(config) if config.run.dry_run else None

    def work(processes: "Processes") -> int:
        if processes.is_primary and notes:
            print("\n".join(notes), flush=True)
        run = loop.train if rehearsal is None else rehearsal.train
        return run(config, processes)

    code = run_worker(work, config.distributed)
    return code if code or rehearsal is None else rehearsal.plan()


def available() -> dict[str, Verb]:
    """The verbs whose modules are installed."""
    return {name: verb for name, verb in VERBS.items() if importlib.util.find_spec(verb.module) is not None}


def usage() -> str:
    """The short help text."""
    lines = [f"  {name:<9}{verb.summary}" for name, verb in available().items()]
    return "\n".join(
        ["usage: shardclip VERB [FLAGS]", "", *lines, "", "shardclip VERB --help lists the flags of a verb."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; a user's mistake is 2, with a message and no stack trace."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    verb = available().get(words[0])
    try:
        if verb is None:
            near = difflib.get_close_matches(words[0], available(), n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise UserError(f"no verb {words[0]!r}{hint}. The verbs are {', '.join(available())}")
        return getattr(importlib.import_module(verb.module), verb.function)(words[1:])
    except UserError as error:
        if _speaks_for_its_host():
            complain(f"shardclip: {error}")
        else:
            time.sleep(SPEAKER_SECONDS)
        return 2


def _speaks_for_its_host() -> bool:
    """Whether this process is the first of its host: all of them see the same mistake in the same flags."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
