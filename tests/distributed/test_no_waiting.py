"""A step only queues work: the host never waits to read what a device computed."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from steps import fused_adamw, training_step
from torch import nn
from waits import waits_for

from shardclip.models.losses.gather import gather
from shardclip.training.loss_scale import LossScale
from shardclip.training.step import TrainingStep


def nadam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One that cannot be told on the device."""
    return torch.optim.NAdam(parameters, lr=1e-3)


def reads(step: TrainingStep) -> list[str]:
    """What the second step reads of the device; the first one makes the optimizer's state."""
    model = step.engine.module
    first = 4 * step.processes.rank
    # One rank has a sample without an image, so that their counts differ.
    batch = tiny.batch([0, 1, 2, 3][step.processes.rank :], [0, 1, 2, 3], 4, first=first)
    step(batch)
    totals = step.agree(batch)
    with waits_for([*model.parameters(), *model.buffers(), step.blank_image]) as found:
        step(batch, totals)
    return list(found)


def reads_of(kind: str, engine: str, accumulation: int, scaled: bool) -> list[str]:
    step = training_step(
        kind, engine, fused_adamw, batch_norm_over_ranks=True, grad_checkpointing=accumulation > 1
    )
    step.accumulation, step.update.max_norm = accumulation, 0.5
    step.update.loss_scale = LossScale(step.processes.device, 1024.0) if scaled else None
    return reads(step)


@pytest.mark.parametrize(("accumulation", "scaled"), [(1, True), (2, False)])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["clip", "siglip", "coca", "resnet"])
def test_a_step_reads_nothing_of_the_device(
    ranks: Any, kind: str, engine: str, accumulation: int, scaled: bool
) -> None:
    assert ranks(2).run(reads_of, kind, engine, accumulation, scaled) == [[], []]


def reads_with_patch_dropout() -> list[str]:
    return reads(training_step("clip", "fsdp", fused_adamw, vision={"patch_dropout": 0.5}))


def test_patches_are_drawn_on_the_device(ranks: Any) -> None:
    assert ranks(2).run(reads_with_patch_dropout) == [[], []]


def reads_with_nadam() -> list[str]:
    return reads(training_step("clip", "ddp", nadam))


def test_an_optimizer_that_cannot_be_told_makes_the_host_wait_once(ranks: Any) -> None:
    """Also shows that a reading is seen."""
    assert ranks(2).run(reads_with_nadam) == [["_local_scalar_dense"]] * 2


def reads_of_gather() -> list[str]:
    images, rows = torch.eye(4), torch.arange(4)
    with waits_for([images]) as found:
        gather(images, images, rows, rows, rows)
    return list(found)


def test_counts_that_are_not_known_are_read(ranks: Any) -> None:
    """Why the step hands them to `gather`; a reading that no operation shows is seen, too."""
    assert ranks(2).run(reads_of_gather) == [["tolist"]] * 2
