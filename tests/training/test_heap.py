"""Memory that a process frees and takes again."""

import resource
from pathlib import Path

import torch
from launched import Launched

from shardclip.training.distributed import DistributedConfig, Processes
from shardclip.training.worker import run_worker

BLOCKS, NUMBERS = 100, 2**18
PAGES = BLOCKS * NUMBERS * 4 // resource.getpagesize()


def _faults_of_a_step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(NUMBERS) for _ in range(BLOCKS)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _say_faults() -> int:
    def work(processes: Processes) -> int:
        print([_faults_of_a_step() for _ in range(3)][-1])
        return 0

    return run_worker(work, DistributedConfig(device="cpu"))


def test_a_rank_does_not_touch_the_pages_of_each_step_anew(tmp_path: Path) -> None:
    with Launched(tmp_path, [{}], _say_faults) as run:
        assert run.end() == [0], run.all_said
        assert int(run.said(0).split()[-1]) < PAGES / 10
