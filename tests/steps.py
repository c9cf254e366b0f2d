"""A `TrainingStep` on a tiny model over all ranks of the pool, and what tests ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardclip.models import factory
from shardclip.models.batch_norm import convert_batch_norm
from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.factory import ModelSpec
from shardclip.models.locking import LockConfig, lock
from shardclip.training.distributed import current
from shardclip.training.objective import Objective, ObjectiveConfig
from shardclip.training.optimizer import clean_name
from shardclip.training.parallel import ParallelConfig, parallelize
from shardclip.training.step import TrainingStep
from shardclip.training.update import Update


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients it is given and changes nothing."""

    def step(self, closure: Any = None) -> None:
        self.gradients = [None if p.grad is None else p.grad.clone() for p in self.param_groups[0]["params"]]


def record(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make a `Recorder`."""
    return Recorder(parameters, lr=0.0)


def pixels(images: Tensor) -> Tensor:
    """uint8 to -0.5 .. 0.5."""
    return images.float() / 255 - 0.5


def training_step(
    kind: str | ModelSpec,
    engine: str,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = record,
    *,
    locked: LockConfig | None = None,
    objective: ObjectiveConfig | None = None,
    teacher: DualEncoder | None = None,
    vision: dict[str, Any] | None = None,
    batch_norm_over_ranks: bool | None = None,
    device: torch.device | None = None,
    **parallel: Any,
) -> TrainingStep:
    """The step of the tiny model `kind` (see `tiny.spec`) under an engine; weights from seed 0."""
    processes = current(device)
    spec = kind if isinstance(kind, ModelSpec) else tiny.spec(kind, **(vision or {}))
    shard = processes.world_size // 2 if engine == "hsdp" and processes.world_size > 2 else None
    settings = {"precision": "fp32", "fsdp_shard_size": shard, **parallel}
    model = factory.build_meta(spec)
    if batch_norm_over_ranks is not None:
        convert_batch_norm(model, synchronised=batch_norm_over_ranks)
    if locked is not None:
        lock(model, locked)
    source = factory.build(spec, seed=0) if processes.is_primary else None
    config = ParallelConfig(distributed_engine=engine, **settings)  # type: ignore[arg-type]
    laid = parallelize(model, config, processes, source=source, blank_text=tiny.blank_text())
    return TrainingStep(
        laid,
        Objective(objective or ObjectiveConfig(siglip=spec.is_sigmoid), spec),
        Update(optimizer([p for p in laid.module.parameters() if p.requires_grad]), processes.device),
        processes,
        pixels=pixels,
        blank_text=tiny.blank_text(),
        blank_image=torch.zeros(1, 3, 32, 32, dtype=torch.uint8, device=processes.device),
        teacher=teacher,
    )


def fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A fused AdamW; scale and bias in a group of their own, as in a run."""
    shards = [p for p in parameters if isinstance(p, DTensor)]
    others = [p for p in parameters if not isinstance(p, DTensor)]
    groups = [{"params": group} for group in (shards, others) if group]
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def whole(value: Tensor) -> Tensor:
    """The full tensor of a shard; collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def weights(step: TrainingStep) -> dict[str, Tensor]:
    """A copy of all parameters, whole, by their plain names; collective."""
    return {
        clean_name(name): whole(parameter.detach()).clone()
        for name, parameter in step.engine.module.named_parameters()
    }


def gradients(step: TrainingStep) -> dict[str, Tensor]:
    """What a `Recorder` was given, whole, by plain names, without those that were None; collective."""
    names = [clean_name(n) for n, p in step.engine.module.named_parameters() if p.requires_grad]
    return {
        name: whole(gradient)
        for name, gradient in zip(names, step.update.optimizer.gradients, strict=True)  # type: ignore[attr-defined]
        if gradient is not None
    }
