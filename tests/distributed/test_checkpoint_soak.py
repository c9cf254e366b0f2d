"""Kills at random moments of a save; SHARDCLIP_KILLS=50 makes it a soak."""

import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from train_states import load_latest, open_checkpoints, state_of, step

from shardclip.training.checkpoint import published, samples_of
from shardclip.training.checkpoint.storage import fault

KILLS = int(os.environ.get("SHARDCLIP_KILLS", "3"))


def save_until_killed(folder: Path, seed: int) -> None:
    """Save again and again; one rank kills itself in one of the first saves, at any point of it."""
    chance = random.Random(seed)
    state = state_of("fsdp")
    step(state)
    checkpoints = open_checkpoints(folder, keep_last=2)
    load_latest(folder, state)
    victim = chance.randrange(2)
    seconds = 0.0
    for number in itertools.count(1):
        samples = int(state.progress.get("samples", 0)) + 1
        state.progress["samples"] = samples
        with torch.no_grad():
            state.model.logit_scale.fill_(float(samples))
        if number == 3 and checkpoints.rank == victim:
            delay = chance.uniform(0, 1.2 * seconds)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        start = time.perf_counter()
        checkpoints.save(samples, state)
        checkpoints.wait()
        seconds = time.perf_counter() - start


def newest(folder: Path) -> tuple[int, float]:
    """Samples seen of the newest checkpoint that a new start takes, and the value that it was given."""
    state = state_of("fsdp")
    path = load_latest(folder, state)
    assert path is not None
    return samples_of(path), float(state.model.logit_scale.detach())


@pytest.mark.long
def test_b49_b50_kills_at_random_moments_lose_nothing(ranks: Any, tmp_path: Path) -> None:
    lost, last = 0, 0
    for seed in range(KILLS):
        with pytest.raises(AssertionError, match=r"died|Connection closed|reset by peer"):
            ranks(2).run(save_until_killed, tmp_path, seed)
        assert [path for path in published(tmp_path) if fault(path) is not None] == []
        (samples, value), other = ranks(2).run(newest, tmp_path)
        assert other == (samples, value)
        # Two saves were finished before the one of the kill, which may be published or not.
        lost += samples < last + 2 or value != samples
        last = samples
    assert lost == 0
