"""The learning rate against closed forms and against open_clip's own schedules."""

import math

import pytest
import torch
from open_clip_train import scheduler as open_clip_scheduler

from shardclip.errors import UserError
from shardclip.training.optimizer import OptimizerConfig
from shardclip.training.schedule import build_schedule

BATCH = 8
STEPS = 40


def _schedule(config: OptimizerConfig, **over: int):
    sizes = {"total_samples": STEPS * BATCH, "epoch_samples": 10 * BATCH, "global_batch": BATCH}
    return build_schedule(config, **{**sizes, **over})


def test_cosine_follows_the_closed_form():
    lr = _schedule(OptimizerConfig(lr=0.5, warmup=4)).lr
    assert [lr(step * BATCH) for step in range(4)] == [0.125, 0.25, 0.375, 0.5]
    for step in range(4, STEPS):
        assert lr(step * BATCH) == pytest.approx(0.25 * (1 + math.cos(math.pi * (step - 4) / 36)), rel=1e-12)


def test_cosine_stays_down_after_the_end():
    lr = _schedule(OptimizerConfig(lr=0.5, warmup=4)).lr
    assert [lr(step * BATCH) for step in (STEPS, STEPS + 1, 2 * STEPS)] == [0.0, 0.0, 0.0]


def test_warmup_as_long_as_the_run_reaches_the_peak():
    lr = _schedule(OptimizerConfig(lr=0.5, warmup=STEPS)).lr
    assert lr((STEPS - 1) * BATCH) == 0.5
    assert lr(STEPS * BATCH) == 0.0


def test_no_warmup_starts_at_the_peak():
    assert _schedule(OptimizerConfig(lr=0.5, warmup=0)).lr(0) == 0.5


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (
            OptimizerConfig(lr=0.5, warmup=4),
            lambda optimizer: open_clip_scheduler.cosine_lr(optimizer, 0.5, 4, STEPS),
        ),
        (
            OptimizerConfig(lr=0.5, warmup=4, lr_scheduler="const"),
            lambda optimizer: open_clip_scheduler.const_lr(optimizer, 0.5, 4, STEPS),
        ),
        (
            OptimizerConfig(
                lr=0.5,
                warmup=4,
                lr_scheduler="const-cooldown",
                epochs_cooldown=2,
                lr_cooldown_end=0.01,
                lr_cooldown_power=2.0,
            ),
            lambda optimizer: open_clip_scheduler.const_lr_cooldown(optimizer, 0.5, 4, STEPS, 20, 2.0, 0.01),
        ),
    ],
    ids=["cosine", "const", "const-cooldown"],
)
def test_every_step_is_open_clips(config, reference):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = reference(optimizer)
    ours = _schedule(config)
    for step in range(STEPS):
        theirs(step)
        assert ours.lr(step * BATCH) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


def test_skipped_schedule_is_constant_from_the_first_step():
    lr = _schedule(OptimizerConfig(lr=0.5, warmup=4, skip_scheduler=True)).lr
    assert {lr(step * BATCH) for step in range(STEPS)} == {0.5}


def test_curve_is_the_same_at_another_batch_size():
    config = OptimizerConfig(lr=0.5, warmup=4)
    first = _schedule(config)
    resumed = _schedule(config, global_batch=4 * BATCH, first_global_batch=BATCH)
    assert resumed.warmup == first.warmup
    for step in range(4, STEPS, 4):
        assert resumed.lr(step * BATCH) == first.lr(step * BATCH)


def test_apply_scales_each_group():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr_scale": scale} for p, scale in zip(parameters, (1.0, 0.25), strict=True)], lr=1.0
    )
    assert _schedule(OptimizerConfig(lr=0.5, warmup=4)).apply(optimizer, BATCH) == 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.0625]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(warmup=STEPS + 1), "--warmup 41 steps are 328 samples, but the whole run is 320"),
        (OptimizerConfig(warmup=1, lr_scheduler="const-cooldown"), "needs --epochs-cooldown"),
        (
            OptimizerConfig(warmup=1, lr_scheduler="const-cooldown", epochs_cooldown=4),
            r"warm-up \(8 samples\) and cooldown \(320\) exceed the run \(320\)",
        ),
    ],
)
def test_impossible_schedules_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        _schedule(config)
