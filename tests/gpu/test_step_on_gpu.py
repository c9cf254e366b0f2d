"""A step on a GPU: it waits for nothing, and its gradient is that of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tiny
import torch
from steps import fused_adamw, gradients, training_step, weights
from torch import Tensor

from shardclip.training.data.batch import Batch, concatenate
from shardclip.training.loss_scale import LossScale
from shardclip.training.step import TrainingStep

pytestmark = pytest.mark.gpu

EVERYONE = [0, 1, 2, 3]


def batch(seed: int = 0) -> Batch:
    """Four samples, one of them without an image, with pinned pixels as the loader hands them over."""
    return concatenate([tiny.batch([1, 2, 3], EVERYONE, 4, seed=seed)], pin_memory=True)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "amp"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("engine", ["none", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["clip", "siglip", "coca", "resnet"])
def test_a_step_does_not_synchronise(
    device: torch.device, kind: str, engine: str, accumulation: int, precision: str
) -> None:
    step = training_step(
        kind, engine, fused_adamw, batch_norm_over_ranks=True, device=device, precision=precision,
        grad_checkpointing=accumulation > 1,
    )  # fmt: skip
    step.accumulation, step.update.max_norm = accumulation, 0.5
    step.update.loss_scale = LossScale(device, 1024.0) if precision == "amp" else None
    for _ in range(3):
        # DDP lays out its buckets anew after the first steps.
        step(batch())
    torch.cuda.synchronize()
    with no_synchronisation():
        totals = step.agree(batch(seed=1))
        result = step(batch(seed=1), totals)
    assert not result.skipped


def test_patch_dropout_does_not_synchronise(device: torch.device) -> None:
    step = training_step("clip", "none", fused_adamw, device=device, vision={"patch_dropout": 0.5})
    step(batch())
    totals = step.agree(batch(seed=1))
    with no_synchronisation():
        result = step(batch(seed=1), totals)
    assert not result.skipped


@pytest.mark.parametrize("kind", ["clip", "coca", "resnet"])
def test_parameters_may_be_kept_on_the_host(device: torch.device, kind: str) -> None:
    """Buffers (masks, running statistics) are where the towers compute all the same."""
    step = training_step(kind, "fsdp", device=device, fsdp_cpu_offload=True, batch_norm_over_ranks=True)
    assert {buffer.device.type for buffer in step.encoder.buffers()} <= {"cuda"}
    here = training_step(kind, "none", batch_norm_over_ranks=True)
    losses = [float(one(batch()).losses["loss"]) for one in (step, here)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_synchronisation_would_be_seen(device: torch.device) -> None:
    step = training_step("clip", "none", lambda p: torch.optim.NAdam(p, lr=1e-3), device=device)
    step(batch())
    with pytest.raises(RuntimeError, match="synchronizing"), no_synchronisation():
        step(batch())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("engine", ["none", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["clip", "siglip", "coca", "timm"])
def test_the_gradient_is_that_of_the_cpu(
    device: torch.device, kind: str, engine: str, accumulation: int
) -> None:
    found = []
    for step in (training_step(kind, "none"), training_step(kind, engine, device=device)):
        step.accumulation = accumulation
        result = step(batch())
        found.append((gradients(step), float(result.losses["loss"]), float(result.gradient_norm)))
    (expected, loss, norm), (ours, our_loss, our_norm) = found
    assert (our_loss, our_norm) == pytest.approx((loss, norm), rel=1e-5)
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        assert _relative_error(gradient.cpu(), expected[name]) < 1e-4, name


@pytest.mark.parametrize("engine", ["none", "fsdp"])
def test_a_gradient_that_is_not_finite_changes_nothing(device: torch.device, engine: str) -> None:
    step = training_step("clip", engine, fused_adamw, device=device)
    step.update.loss_scale = LossScale(device, 1024.0)
    step(batch())
    before, counts = weights(step), _counts(step)
    healthy = step.pixels
    step.pixels = lambda images: healthy(images) * torch.nan
    result = step(batch())
    assert result.skipped
    assert step.culprits(batch()) == ["sample-1", "sample-2", "sample-3"]
    assert all(torch.equal(value, before[name]) for name, value in weights(step).items())
    assert _counts(step) == counts
    assert float(step.update.loss_scale.value) == 512.0
    step.pixels = healthy
    assert not step(batch()).skipped
    assert any(not torch.equal(value, before[name]) for name, value in weights(step).items())


def _relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm().clamp(min=1e-6))


def _counts(step: TrainingStep) -> list[float]:
    """Updates that the optimizer has made of each parameter."""
    return [float(state["step"]) for state in step.update.optimizer.state.values()]
