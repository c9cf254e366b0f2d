"""Promise 1: the gradient, the loss and the norm of a step are those of one process on the whole batch.

Every case runs the real `TrainingStep` on real processes and compares each parameter's gradient with naive
autograd over the concatenated batch in one process (and, where all samples are pairs, with open_clip's loss).
"""

from __future__ import annotations

from itertools import product

import pytest
import tiny
import torch
import torch.nn.functional as F
from steps import gradients, pixels, training_step
from torch import Tensor

from shardclip.models import factory
from shardclip.models.dual_encoder import DualEncoder
from shardclip.training.data.batch import Batch, concatenate
from shardclip.training.step import StepResult, TrainingStep

SAMPLES = 16
SCENARIOS = ("paired", "uneven", "rank without images", "rank without texts")
LOSSES = ("clip", "siglip", "coca", "distill")
ACCUMULATIONS = (1, 4)


def local_batch(scenario: str, rank: int, world_size: int) -> Batch:
    """Rank `rank`'s part of the 16 samples; on one process half of them stands for the odd rank."""
    samples = SAMPLES // world_size
    first = rank * samples
    everyone = list(range(samples))
    rest = everyone[: samples // 2] if world_size == 1 else []
    images, texts = everyone, everyone
    if scenario == "uneven":
        images = [s for s in everyone if (first + s) % 5 != 1]
        texts = [s for s in everyone if (first + s) % 7 != 3]
    elif scenario == "rank without images" and rank == world_size - 1:
        images = rest
    elif scenario == "rank without texts" and rank == world_size - 1:
        texts = rest
    return tiny.batch(images, texts, samples, first=first)


def naive_loss(model: DualEncoder, batch: Batch, loss: str, teacher: DualEncoder | None) -> Tensor:
    """The loss of the whole batch on one process, with nothing but autograd."""
    equal = batch.image_sample[:, None] == batch.text_sample[None, :]
    image_rows, text_rows = equal.nonzero(as_tuple=True)
    captions = (image_rows, text_rows) if loss == "coca" else None
    out = model(pixels(batch.images), batch.texts, caption_pairs=captions)
    logits = out.logit_scale * out.image_features @ out.text_features.T
    if loss == "siglip":
        labels = 2.0 * equal - 1.0
        return -F.logsigmoid(labels * (logits + out.logit_bias)).sum() / len(image_rows)
    both = (logits[image_rows], text_rows), (logits.T[text_rows], image_rows)
    total = sum(F.cross_entropy(rows, target) for rows, target in both) / 2
    if loss == "coca":
        caption = F.cross_entropy(
            out.caption_logits.transpose(1, 2), batch.texts[text_rows, 1:], ignore_index=0, reduction="sum"
        )
        total = total + 2.0 * caption / (batch.texts[:, 1:] != 0).sum()
    if loss == "distill":
        with torch.no_grad():
            seen = teacher(pixels(batch.images), batch.texts)
            wanted = seen.logit_scale * seen.image_features @ seen.text_features.T
        sides = (
            (wanted[image_rows], logits[image_rows]),
            (wanted.T[text_rows], logits.T[text_rows]),
        )
        total = total + sum(-(q.softmax(-1) * z.log_softmax(-1)).sum(-1).mean() for q, z in sides) / 2
    return total


def reference(loss: str, scenario: str, world_size: int) -> tuple[dict[str, Tensor], float]:
    """Gradients by name and loss of one process on the concatenated batch."""
    model, teacher = plain_model(loss), teacher_of(loss)
    whole = concatenate([local_batch(scenario, rank, world_size) for rank in range(world_size)])
    value = naive_loss(model, whole, loss, teacher)
    value.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, value.item()


def plain_model(loss: str) -> DualEncoder:
    return factory.build(tiny.spec("clip" if loss == "distill" else loss), seed=0)


def teacher_of(loss: str) -> DualEncoder | None:
    return factory.build(tiny.spec("clip"), seed=7).requires_grad_(False) if loss == "distill" else None


def compare(
    step: TrainingStep, result: StepResult, expected: dict[str, Tensor], loss: float
) -> dict[str, float]:
    """Largest relative error of a gradient, and those of norm and loss."""
    found = gradients(step)
    norm = torch.stack([g.double().norm() for g in expected.values()]).norm().item()
    worst = max(
        ((found[name] - gradient).norm() / max(gradient.norm().item(), 1e-3 * norm)).item()
        for name, gradient in expected.items()
    )
    extra = max([g.abs().max().item() for name, g in found.items() if name not in expected], default=0.0)
    return {
        "gradient": worst,
        "unexpected": extra,
        "norm": abs(float(result.gradient_norm) - norm) / norm,
        "loss": abs(float(result.losses["loss"]) - loss) / abs(loss),
    }


def errors_of(loss: str, engine_name: str) -> dict[tuple[str, int], dict[str, float]]:
    """Runs on every rank: all scenarios and accumulations of one loss under one engine."""
    step = training_step("clip" if loss == "distill" else loss, engine_name, teacher=teacher_of(loss))
    world_size = step.processes.world_size
    errors = {}
    for scenario in SCENARIOS:
        expected, value = reference(loss, scenario, world_size)
        for step.accumulation in ACCUMULATIONS:
            result = step(local_batch(scenario, step.processes.rank, world_size))
            errors[scenario, step.accumulation] = compare(step, result, expected, value)
    return errors


CASES = [
    pytest.param(world_size, engine, loss, marks=[pytest.mark.long] if world_size == 4 else [])
    for world_size, engine, loss in product((1, 2, 4), ("none", "ddp", "fsdp", "hsdp"), LOSSES)
    if engine in (("none", "fsdp") if world_size == 1 else ("ddp", "fsdp", "hsdp"))
]


@pytest.mark.parametrize(("world_size", "engine", "loss"), CASES)
def test_b09_b10_b28_gradient_loss_and_norm_are_those_of_one_process(ranks, world_size, engine, loss) -> None:
    for rank, errors in enumerate(ranks(world_size).run(errors_of, loss, engine)):
        for case, found in errors.items():
            assert max(found.values()) <= 1e-5, (rank, case, found)
