"""One training step of one rank, simulated: the run's own engine, optimizer and loss, on empty tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.dual_encoder import DualEncoder, Encoded
from shardclip.models.factory import ModelSpec
from shardclip.models.locking import lock
from shardclip.models.losses.caption import caption_cross_entropy
from shardclip.models.losses.gather import GlobalBatch, gather
from shardclip.training.config import TrainConfig
from shardclip.training.distributed import Processes
from shardclip.training.ema import Ema
from shardclip.training.objective import Objective
from shardclip.training.optimizer import ParameterPlan, build_optimizer, gradient_norm, plan_parameters
from shardclip.training.parallel import lay_out
from shardclip.training.planning.ledger import (
    AVERAGE,
    GRADIENTS,
    LOSS,
    MOMENTS,
    PARAMETERS,
    Cost,
    Ledger,
    Traffic,
)

PREVIEW, FORWARD, LOSS_PHASE, BACKWARD, UPDATE = "preview", "forward", "loss", "backward", "update"
UNSYNCED_FORWARD, UNSYNCED_BACKWARD = "forward of a micro-batch", "backward of a micro-batch"

_BUCKET_BYTES = 25 * 2**20
"""Size of DistributedDataParallel's buckets of gradients, but for the first of 1 MiB."""


_LOSSES: dict[tuple[Any, ...], Cost] = {}
"""What a loss took, by all that it depends on: it is the same for towers of every depth, and with many ranks
the longest part of a simulation."""


@dataclass(frozen=True)
class World:
    """The ranks to simulate."""

    gpus: int
    per_node: int

    def processes(self) -> Processes:
        """Rank 0 of them, on tensors of the CPU."""
        local = min(self.gpus, self.per_node)
        return Processes(0, self.gpus, 0, local, torch.device("cpu"), "single", "simulated")


@dataclass(frozen=True)
class Measured:
    """What a step takes on one rank."""

    peaks: dict[str, dict[str, float]]
    """Phase -> bytes of each kind at the phase's peak."""
    traffic: dict[str, Traffic]
    """Kind of collective -> how many, and their bytes, per step."""
    forward_flops: float
    """Of the forward pass of one micro-batch."""
    step_flops: float
    """Of the whole step of this rank."""


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """A process group of `world.gpus` ranks in which this process is rank 0 and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world.gpus)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(config: TrainConfig, spec: ModelSpec, world: World) -> Measured:
    """Simulate one step of `config` with the architecture `spec`; wants `simulated(world)` around it.

    Offloaded state is not left out: what lies on the host is the caller's to tell apart.

    Raises:
        UserError: the settings do not fit each other, or a tower looks at values, which there are none of.
    """
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, fsdp_cpu_offload=False, torchcompile=False),
    )
    model = factory.build_meta(spec)
    lock(model, config.lock)
    plan = plan_parameters(model, config.optimizer)
    lay_out(model, config.parallel, world.processes())
    step = _Step(config, spec, world, model, plan)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            step.run()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"{spec.name} cannot be simulated: one of its towers decides by values ({error.func})"
        ) from error
    return step.measured()


class _Step:
    """The phases of `shardclip.training.step.TrainingStep`, without what looks at values."""

    def __init__(
        self, config: TrainConfig, spec: ModelSpec, world: World, model: DualEncoder, plan: ParameterPlan
    ) -> None:
        self.config, self.spec, self.world, self.model, self.plan = config, spec, world, model, plan
        self.ledger = Ledger()
        self.rows, self.micro_batches = config.run.batch_size, config.run.accum_freq
        self.objective = Objective(config.objective, spec)

    def run(self) -> None:
        """One step; the optimizer has made one before, so that its moments are there as in later ones."""
        ledger, model = self.ledger, self.model
        model._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
        optimizer = build_optimizer(model, self.plan, self.config.optimizer)
        ledger.label(PARAMETERS, [*model.parameters(), *model.buffers()])
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        shards = _take_shards(optimizer)
        for shard in shards.values():
            shard.grad = torch.zeros_like(shard)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state = [value for values in optimizer.state.values() for value in values.values()]
        ledger.label(MOMENTS, [value for value in state if isinstance(value, Tensor)])
        if self.config.ema.ema_decay is not None:
            average = Ema(model, self.config.ema.ema_decay)
            ledger.label(AVERAGE, average._averages.values())
        self._gradients()
        ledger.label(GRADIENTS, [p.grad for p in trainable if p.grad is not None])
        with ledger.phase(UPDATE):
            gradient_norm(trainable)
            for parameter, shard in shards.items():
                shard.grad = None if parameter.grad is None else _local(parameter.grad)
            optimizer.step()

    def _gradients(self) -> None:
        ledger = self.ledger
        if self.micro_batches > 1:
            with ledger.phase(PREVIEW), torch.no_grad():
                out = self._forward()
            self._loss(out)
            # One of the micro-batches before the last stands for all of them.
            self._synchronise(False)
            with ledger.phase(UNSYNCED_FORWARD):
                out = self._forward()
            self._backward(out, UNSYNCED_BACKWARD)
            self._synchronise(True)
        with ledger.phase(FORWARD):
            out = self._forward()
        if self.micro_batches == 1:
            self._loss(out)
        self._backward(out, BACKWARD)

    def _synchronise(self, active: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(active)

    def _forward(self) -> Encoded:
        size: Any = self.model.visual.image_size
        height, width = size if isinstance(size, tuple) else (size, size)
        images = torch.empty(self.rows, 3, height, width)
        texts = torch.zeros(self.rows, self._context_length, dtype=torch.int64)
        rows = torch.arange(self.rows)
        return self.model(images, texts, caption_pairs=(rows, rows) if self.objective.is_captioning else None)

    @property
    def _context_length(self) -> int:
        return int(self.spec.model_cfg["text_cfg"].get("context_length", 77))

    def _loss(self, out: Encoded) -> None:
        assert out.image_features is not None and out.text_features is not None
        parts = self.micro_batches
        images = out.image_features.detach().repeat(parts, 1).requires_grad_()
        texts = out.text_features.detach().repeat(parts, 1).requires_grad_()
        scale = out.logit_scale.detach().requires_grad_()
        bias = None if out.logit_bias is None else out.logit_bias.detach().requires_grad_()
        key = (images.shape, bias is None, self.config.objective, self.world)
        if key in _LOSSES:
            self.ledger.repeat(LOSS_PHASE, LOSS, _LOSSES[key])
            return
        with self.ledger.phase(LOSS_PHASE, LOSS):
            whole = _numbers(len(images)).with_features(images, texts)
            losses = self.objective.feature_losses(images, texts, scale, bias, whole)
            leaves = [leaf for leaf in (images, texts, scale, bias) if leaf is not None]
            total = torch.stack(list(losses.values())).sum()
            torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        _LOSSES[key] = self.ledger.cost(LOSS_PHASE, LOSS)

    def _backward(self, out: Encoded, phase: str) -> None:
        with self.ledger.phase(phase):
            roots = [(t, torch.ones_like(t)) for t in out[:4] if t is not None and t.requires_grad]
            if out.caption_logits is not None:
                labels = torch.zeros(out.caption_logits.shape[:2], dtype=torch.int64)
                loss = caption_cross_entropy(out.caption_logits, labels, self.rows, pad_id=-1)
                roots.append((loss, torch.ones_like(loss)))
            torch.autograd.backward([t for t, _ in roots], [seed for _, seed in roots])
        del out, roots
        self.ledger.label_survivors(GRADIENTS, phase)

    def measured(self) -> Measured:
        """The ledger, with the micro-batches that were not simulated counted in."""
        repeats = {PREVIEW: self.micro_batches}
        repeats |= dict.fromkeys((UNSYNCED_FORWARD, UNSYNCED_BACKWARD), self.micro_batches - 1)
        traffic: dict[str, Traffic] = {}
        for phase, kinds in self.ledger.traffic.items():
            for kind, sent in kinds.items():
                traffic[kind] = traffic.get(kind, Traffic()) + sent * repeats.get(phase, 1)
        if self.config.parallel.engine(self.world.gpus) == "ddp":
            traffic["all-reduce"] = traffic.get("all-reduce", Traffic()) + _buckets(self.model)
        return Measured(
            {phase: dict(kinds) for phase, kinds in self.ledger.peaks().items()},
            traffic,
            self.ledger.flops[FORWARD],
            sum(flops * repeats.get(phase, 1) for phase, flops in self.ledger.flops.items()),
        )


def _take_shards(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, nn.Parameter]:
    """Let the optimizer update local shards, each for its parameter.

    It is the same memory; a DTensor would first derive how each operation is to be sharded, which takes
    most of the time of a simulated step.
    """
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for group in optimizer.param_groups:
        mine = {parameter: nn.Parameter(_local(parameter).detach()) for parameter in group["params"]}
        group["params"] = list(mine.values())
        shards |= mine
    return shards


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _numbers(rows: int) -> GlobalBatch:
    """What `gather` says of full batches on all ranks: real sizes and numbers, features without width.

    The ranks that do not exist are taken to hold what this one holds.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        samples = torch.arange(rows)
        features = torch.zeros(rows, 0)
        return gather(features, features, samples, samples, samples)


def _buckets(model: nn.Module) -> Traffic:
    """DistributedDataParallel's reductions of the gradients, in buckets of 25 MiB."""
    size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return Traffic(1 + -(-max(size - 2**20, 0) // _BUCKET_BYTES), size)
