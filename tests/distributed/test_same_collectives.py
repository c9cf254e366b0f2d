"""A whole run issues the same collectives on every rank, and its evaluation may outlast their time limit."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from disturbed import delayed
from launched import HANG_SECONDS, Launched, torchrun_environments

from commands import rows, small_run
from shardclip import cli
from shardclip.training.distributed import Position


def run_of_three_epochs(folder: Path, *more: str) -> list[str]:
    flags = (
        "--dataset-type synthetic --train-num-samples 32 --epochs 3 --val-num-samples 12 --val-batch-size 4 "
        "--no-async-save --log-metric-every-n-steps 1"
    )
    return ["train", *small_run(folder), *flags.split(), *more]


def counted(words: list[str], folder: Path) -> int:
    """`shardclip WORDS`; leaves how many collectives each group had seen when each phase began."""
    seen: list[Any] = []
    note = Position.at

    def at(self: Position, phase: str, step: int | None = None, keys: list[str] | None = None) -> None:
        # Groups have the same names on all ranks, and gloo counts what each was asked for.
        groups = dist.distributed_c10d._world.pg_names.items()
        seen.append([phase, step, {name: group._get_sequence_number_for_group() for group, name in groups}])
        note(self, phase, step, keys)

    Position.at = at  # type: ignore[method-assign]
    code = cli.main(words)
    (folder / f"counts-{os.environ['RANK']}.json").write_text(json.dumps(seen))
    return code


def test_b02_every_phase_has_the_same_collectives_on_both_ranks(tmp_path: Path) -> None:
    words = run_of_three_epochs(tmp_path, "--fsdp")
    with Launched(tmp_path, torchrun_environments(2), counted, words, tmp_path) as run:
        assert run.end() == [0, 0], run.all_said
    first, second = (json.loads((tmp_path / f"counts-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    phases = [phase for phase, *_ in first]
    assert phases.count("train") == 12
    assert phases.count("evaluate") == phases.count("save") == 3
    totals = [sum(counts.values()) for *_, counts in first]
    during = [
        (phase, after - before) for phase, before, after in zip(phases, totals, totals[1:], strict=False)
    ]
    in_evaluation = [count for phase, count in during if phase == "evaluate"]
    # Encoding the same pairs takes the same gathers each time; the first time, a group is made as well.
    assert in_evaluation[1] == in_evaluation[2] > 10


def late_under_a_limit(words: list[str], limit: float) -> int:
    """`shardclip WORDS`; collectives that an evaluation begins with may take so long, its data twice that.

    The limit holds from there on alone: on a busy machine the ranks' start may take longer.
    """
    note = Position.at

    def at(self: Position, phase: str, step: int | None = None, keys: list[str] | None = None) -> None:
        seconds = limit if phase == "evaluate" else HANG_SECONDS
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
        note(self, phase, step, keys)

    Position.at = at  # type: ignore[method-assign]
    return delayed(words, "validation", 2 * limit)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["--ddp", "--fsdp"])
def test_b03_an_evaluation_twice_as_long_as_the_time_limit_of_collectives(
    tmp_path: Path, engine: str
) -> None:
    words = run_of_three_epochs(tmp_path, engine, "--epochs", "1")
    with Launched(tmp_path, torchrun_environments(2), late_under_a_limit, words, 10.0) as run:
        assert run.end() == [0, 0], run.all_said
    (result,) = rows(tmp_path, "first", "results.jsonl")
    assert result["num_samples"] == 12
