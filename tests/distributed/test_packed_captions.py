"""A step on packed captions is the step on padded ones, sharded or not, recomputed, compiled, in parts."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from steps import gradients, training_step
from torch import Tensor

from shardclip.training.data.batch import Batch
from shardclip.training.step import TrainingStep

STEPS = 4


def own_batch(step: TrainingStep, seed: int) -> Batch:
    """More samples at each step, an empty caption and a full one that was cut; once a rank has no text."""
    everyone = list(range(8 + 3 * seed))
    batch = tiny.batch(everyone, everyone, len(everyone), seed=seed, first=100 * step.processes.rank)
    batch.texts[0] = tiny.blank_text()
    batch.texts[1, 1:] = torch.tensor([*range(1, 15), 127])
    if seed == 0 and step.processes.rank == 1:
        batch.texts, batch.text_sample = batch.texts[:0], batch.text_sample[:0]
    return batch


def run(engine: str, accumulation: int, packed: bool, **parallel: Any) -> tuple[list[dict[str, Tensor]], int]:
    """Gradients and losses of some steps; how many graphs the last one compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = training_step("clip", engine, **parallel)
    step.accumulation = accumulation
    if not packed:
        step.encoder.end_mark, step.encoder.sees_padding = None, True
    found, graphs = [], []
    for seed in range(STEPS):
        result = step(own_batch(step, seed))
        found.append({**gradients(step), "loss": result.losses["loss"].detach()})
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found, graphs[-1] - graphs[-2]


def largest_error(engine: str, accumulation: int, parallel: dict[str, Any]) -> tuple[float, int]:
    """Runs on every rank: packed against padded, relative to a tensor or 1/1000 of the whole gradient."""
    expected, _ = run(engine, accumulation, packed=False)
    found, more_graphs = run(engine, accumulation, packed=True, **parallel)
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        whole = torch.stack([value.norm() for value in other.values()]).norm()
        errors = [
            (one[name] - value).norm() / torch.maximum(value.norm(), 1e-3 * whole)
            for name, value in other.items()
        ]
        worst = max(worst, float(torch.stack(errors).max()))
    return worst, more_graphs


COMPILED = {"torchcompile": True, "torchcompile_backend": "eager"}


@pytest.mark.parametrize(
    ("world_size", "engine", "accumulation", "parallel"),
    [
        (2, "fsdp", 2, {}),
        pytest.param(1, "none", 1, COMPILED, marks=pytest.mark.long),
        pytest.param(2, "ddp", 2, COMPILED, marks=pytest.mark.long),
        pytest.param(2, "fsdp", 1, COMPILED | {"grad_checkpointing": True}, marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_padded_captions(ranks, world_size, engine, accumulation, parallel) -> None:
    for error, more_graphs in ranks(world_size).run(largest_error, engine, accumulation, parallel):
        assert error <= 1e-5
        # The number of rows is different in every step: it is not compiled for again and again.
        assert more_graphs == 0


def calls_of_blocks(engine: str) -> list[tuple[int, ...]]:
    """Runs on every rank: shapes that the blocks of the text tower are called with in one step."""
    step = training_step("clip", engine)
    shapes: list[tuple[int, ...]] = []
    for block in step.encoder.text.transformer.resblocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    step(own_batch(step, seed=1))
    return shapes


def test_every_block_is_called_once_on_rows_of_real_tokens(ranks) -> None:
    for shapes in ranks(2).run(calls_of_blocks, "fsdp"):
        (rows, length, width) = shapes[0]
        assert shapes == [(rows, length, width)] * 2
        assert length == 16
        assert rows < 11
