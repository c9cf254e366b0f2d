"""The command `shardclip`: one verb, then flags.

shardclip train --model ViT-B-32 --train-data 'shards/{000..099}.tar' --train-num-samples 1000000
shardclip train --nproc 8 --fsdp ...          # eight processes on this machine
torchrun --nproc-per-node 8 -m shardclip train --fsdp ...
srun shardclip train --fsdp ...               # one task per GPU
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from shardclip.errors import UserError


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
    "index": Verb("shardclip.training.data.index", "main", "count and index shards"),
    "export": Verb("shardclip.training.export", "main", "write a checkpoint that open_clip opens"),
    "doctor": Verb("shardclip.doctor", "main", "what this machine has, and what a run would miss"),
    "plot": Verb(
        "shardclip.training.plotting", "main", "draw loss, accuracy, throughput, scale and norms of runs"
    ),
    "compare": Verb("shardclip.training.plotting", "compare", "a table of the evaluation results of runs"),
}


def train(argv: Sequence[str]) -> int:
    """`shardclip train`: start the processes that launch flags ask for, or be one of them."""
    from shardclip.training import launch

    return launch.main(argv)


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
            raise UserError(f"no verb {words[0]!r}: it is one of {', '.join(available())}")
        return getattr(importlib.import_module(verb.module), verb.function)(words[1:])
    except UserError as error:
        print(f"shardclip: {error}", file=sys.stderr)
        return 2
