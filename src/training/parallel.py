"""How the model lies over the processes: none, DDP, FSDP or HSDP, with precision, recompute and compile.

Freezing and the decay set come before, on the plain model. Here: recompute -> compile -> shard -> weights.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardclip.errors import UserError
from shardclip.models.dual_encoder import DualEncoder
from shardclip.training.distributed import Processes
from shardclip.training.filling import materialize, send_weights
from shardclip.training.units import (
    Unit,
    find_blocks,
    find_units,
    runs_in_order,
    select,
    select_names,
    table,
    towers,
)

log = logging.getLogger(__name__)

EngineKind = Literal["none", "ddp", "fsdp", "hsdp"]
Precision = Literal["fp32", "amp_bf16", "amp_bfloat16", "bf16", "amp", "fp16"]

_DTYPES: dict[str, torch.dtype | None] = {
    "fp32": None,
    "amp_bf16": torch.bfloat16,
    "amp_bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "amp": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class ParallelConfig:
    """How the model lies over the processes, and what it computes in."""

    distributed_engine: EngineKind | None = None
    """Engine by name; --ddp and --fsdp are shorter. Default: ddp on several processes, none on one."""
    ddp: bool = False
    """Replicate the model: torch's DistributedDataParallel."""
    fsdp: bool = False
    """Shard the model: torch's fully_shard (FSDP2)."""
    precision: Precision = "amp_bf16"
    """What the towers compute in. Weights, moments, scale, loss and sums are fp32 in each of them."""
    fsdp_layers_to_wrap: tuple[str, ...] = ()
    """Class names, or regular expressions on them, of the modules that are gathered as a whole.
    Default: the blocks that each tower repeats."""
    fsdp_min_params: int | None = None
    """Gather modules by size instead: the innermost ones with at least so many parameters."""
    fsdp_shard_size: int | None = None
    """Shard within so many ranks and replicate across (HSDP). Default: the processes of a node."""
    fsdp_no_reshard_after_forward: bool = False
    """Keep gathered parameters from forward to backward: less traffic, more memory."""
    fsdp_keep_gathered: tuple[str, ...] = ()
    """The same for some units only: names (visual.transformer.resblocks.47, text for the rest of that tower),
    class names, or regular expressions on either."""
    fsdp_forward_prefetch: int = 0
    """Units that a unit asks for ahead of itself in forward. 0 leaves it to FSDP2, which gathers the next one
    as soon as the host comes to it; more helps where the host is late, for the memory of so many units."""
    fsdp_backward_prefetch: int = 1
    """Units that a unit asks for ahead of itself in backward; 1 is FSDP2's own way."""
    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and moments in the memory of the host."""
    fsdp_gradient_reduction_precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What gradients are summed in over the ranks."""
    fsdp_layers_to_grad_checkpoint: tuple[str, ...] = ()
    """Class names, or regular expressions on them, of the modules whose activations are recomputed."""
    grad_checkpointing: bool = False
    """Recompute activations in backward, in every block (or those of --fsdp-layers-to-grad-checkpoint)."""
    grad_checkpointing_every: int = 1
    """Recompute only every n-th of those modules."""
    use_bn_sync: bool = False
    """Take the statistics of BatchNorm over all ranks: then its gradient is that of the whole batch, too."""
    torchcompile: bool = False
    """Compile each block with torch.compile."""
    torchcompile_backend: str = "inductor"
    """Backend of torch.compile."""
    torchcompile_mode: str | None = None
    """Mode of torch.compile."""

    def __post_init__(self) -> None:
        for name, least in (
            ("fsdp_forward_prefetch", 0),
            ("fsdp_backward_prefetch", 1),
            ("grad_checkpointing_every", 1),
        ):
            if getattr(self, name) < least:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} {getattr(self, name)}: must be {least} or more")

    def engine(self, world_size: int) -> EngineKind:
        """The engine that the flags ask for on `world_size` processes.

        Raises:
            UserError: the flags contradict each other.
        """
        asked = {
            name
            for name, wanted in (("ddp", self.ddp), ("fsdp", self.fsdp), (self.distributed_engine, True))
            if wanted and name is not None
        }
        if asked == {"fsdp", "hsdp"}:
            asked = {"hsdp"}
        if len(asked) > 1:
            raise UserError(f"--ddp, --fsdp and --distributed-engine ask for {' and '.join(sorted(asked))}")
        if not asked:
            return "ddp" if world_size > 1 else "none"
        (kind,) = asked
        if kind == "none" and world_size > 1:
            raise UserError(f"--distributed-engine none wants one process; there are {world_size}")
        return kind  # type: ignore[return-value]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What the towers compute in; None is fp32 throughout."""
        return _DTYPES[self.precision]


@dataclass(frozen=True)
class Engine:
    """The model as it lies over the processes. Call `module` as one calls `DualEncoder`."""

    kind: EngineKind
    module: nn.Module
    gradient_divisor: int
    """What the engine divides summed gradients by: the step multiplies by it, once."""
    compute_dtype: torch.dtype | None
    units: tuple[Unit, ...] = ()

    @contextmanager
    def synchronising(self, active: bool) -> Iterator[None]:
        """Forward and backward inside reduce gradients over the ranks only if `active`."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(active)
            yield
        elif isinstance(self.module, DistributedDataParallel) and not active:
            with self.module.no_sync():
                yield
        else:
            yield


def parallelize(
    model: DualEncoder,
    config: ParallelConfig,
    processes: Processes,
    *,
    source: DualEncoder | None,
    blank_text: Tensor,
) -> Engine:
    """Lay `model` over the processes and fill it with the weights of rank 0's `source`.

    Args:
        model: the model on the meta device, frozen as it shall be; becomes the engine's module, in place.
        config: the flags.
        processes: this run's processes.
        source: on rank 0 the same architecture with its starting weights (CPU, fp32); None elsewhere.
        blank_text: token ids [1, L] of an empty caption.

    Raises:
        UserError: a pattern matches nothing, a tower has no unit, the sizes do not fit.
    """
    kind = config.engine(processes.world_size)
    sharded = kind in ("fsdp", "hsdp")
    units = lay_out(model, config, processes)
    device = torch.device("cpu") if config.fsdp_cpu_offload and sharded else processes.device
    # FSDP brings the parameters to where the towers compute, and leaves the buffers to us.
    materialize(model, parameters=device, buffers=processes.device)
    if sharded and config.fsdp_cpu_offload:
        for scalar in _scalars(model):
            scalar.data = scalar.data.to(processes.device)
    send_weights(model, source, processes)
    if kind == "ddp":
        module = _replicate(model, processes, blank_text.to(processes.device))
        return Engine(kind, module, processes.world_size, config.compute_dtype)
    divisor = processes.world_size if sharded else 1
    return Engine(kind, model, divisor, config.compute_dtype, tuple(units))


def lay_out(model: DualEncoder, config: ParallelConfig, processes: Processes) -> list[Unit]:
    """Make `model` recompute, compile and shard as the flags say, in place and still on the meta device.

    Needs a process group if it shards, but no data of it: a simulated one will do (`shardclip plan`).

    Returns:
        The units inside the towers; none if the engine does not shard.

    Raises:
        UserError: a pattern matches nothing, a tower has no unit, the sizes do not fit.
    """
    kind = config.engine(processes.world_size)
    sharded = kind in ("fsdp", "hsdp")
    units = find_units(model, config.fsdp_layers_to_wrap, config.fsdp_min_params) if sharded else []
    if units:
        log.info("FSDP units\n%s", table(units, model))
    _recompute(model, config)
    _compile(model, config)
    if sharded:
        _shard(model, units, config, _mesh(kind, config, processes))
        _prefetch(model, units, config)
    else:
        model.compute_dtype = config.compute_dtype
    return units


def _scalars(model: DualEncoder) -> set[nn.Parameter]:
    return {p for p in (model.logit_scale, model.logit_bias) if p is not None}


def _recompute(model: DualEncoder, config: ParallelConfig) -> None:
    patterns = config.fsdp_layers_to_grad_checkpoint
    if not (config.grad_checkpointing or patterns):
        return
    if patterns:
        names = select(model, "--fsdp-layers-to-grad-checkpoint", patterns)
    else:
        names = [f"{tower}.{name}" for tower, module in towers(model) for name, _ in find_blocks(module)]
    for name in names[:: config.grad_checkpointing_every]:
        block = model.get_submodule(name)
        # On the instance, so that no parameter's name changes (torch's checkpoint_wrapper changes them).
        block.forward = _recomputed(block.forward)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # A function of Python's own: torch.compile looks into it, and would skip a partial of `checkpoint`.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


def _compile(model: DualEncoder, config: ParallelConfig) -> None:
    if not config.torchcompile:
        return
    from torch._dynamo import config as dynamo

    # It cuts graphs where DDP's buckets end, so that those are sent sooner. A block is small enough for one.
    dynamo.optimize_ddp = False
    for _, tower in towers(model):
        for _, block in find_blocks(tower):
            block.compile(backend=config.torchcompile_backend, mode=config.torchcompile_mode)


def shard_size(kind: EngineKind, config: ParallelConfig, processes: Processes) -> int:
    """How many ranks a parameter is cut into; every so many ranks hold the whole of it.

    Raises:
        UserError: --fsdp-shard-size does not divide the processes.
    """
    world = processes.world_size
    if kind not in ("fsdp", "hsdp"):
        return 1
    several_nodes = processes.local_world_size < world
    size = config.fsdp_shard_size or (
        processes.local_world_size if kind == "hsdp" or several_nodes else world
    )
    if world % size:
        raise UserError(f"--fsdp-shard-size {size} does not divide the {world} processes")
    return size


def _mesh(kind: EngineKind, config: ParallelConfig, processes: Processes) -> DeviceMesh:
    if not dist.is_initialized():
        backend = "nccl" if processes.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world, size = processes.world_size, shard_size(kind, config, processes)
    if size == world and kind != "hsdp":
        return init_device_mesh(processes.device.type, (world,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(
        processes.device.type, (world // size, size), mesh_dim_names=("replicate", "shard")
    )
    if processes.timeout is not None:
        # A mesh gives its groups torch's default, whatever the group of all ranks was given.
        for group in mesh.get_all_groups():
            dist.set_timeout(processes.timeout, group)
    return mesh


def _shard(model: DualEncoder, units: Sequence[Unit], config: ParallelConfig, mesh: DeviceMesh) -> None:
    reduce_dtype = _DTYPES[config.fsdp_gradient_reduction_precision] or torch.float32
    precision = MixedPrecisionPolicy(param_dtype=config.compute_dtype, reduce_dtype=reduce_dtype)
    offload = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if config.fsdp_cpu_offload
        else OffloadPolicy()
    )
    # Features are views of a tower's output; nothing here works on them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    names = [unit.name for unit in units] + [name for name, _ in towers(model)]
    kept = select_names(model, "--fsdp-keep-gathered", names, config.fsdp_keep_gathered)
    for name in names:
        fully_shard(
            model.get_submodule(name),
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=not (config.fsdp_no_reshard_after_forward or name in kept),
        )
    # The root holds scale and bias alone. They stay whole and fp32 on every rank: see docs/design.md, 8.
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        offload_policy=offload,
        ignored_params=_scalars(model),
    )


def _prefetch(model: DualEncoder, units: Sequence[Unit], config: ParallelConfig) -> None:
    ahead, behind = config.fsdp_forward_prefetch, config.fsdp_backward_prefetch
    for names in runs_in_order(model, units):
        modules = [cast(FSDPModule, model.get_submodule(name)) for name in names]
        for place, module in enumerate(modules):
            if ahead:
                module.set_modules_to_forward_prefetch(modules[place + 1 : place + 1 + ahead])
            if behind > 1:
                module.set_modules_to_backward_prefetch(modules[max(place - behind, 0) : place][::-1])


def _idle(model: DualEncoder, blank_text: Tensor) -> list[str]:
    """Names of parameters that no output depends on (an unused pooler, say)."""
    image_size = model.visual.image_size
    size = image_size if isinstance(image_size, tuple) else (image_size, image_size)
    blank_image = torch.zeros(1, 3, *size, device=blank_text.device)
    rows = torch.zeros(1, dtype=torch.int64, device=blank_text.device)
    pairs = (rows, rows) if hasattr(model, "text_decoder") else None
    training = model.training
    model.eval()
    outputs = [out for out in model(blank_image, blank_text, caption_pairs=pairs) if out is not None]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = torch.stack([out.float().sum() for out in outputs]).sum()
    gradients = torch.autograd.grad(total, list(trainable.values()), allow_unused=True)
    # Not sooner: blocks that recompute run again in the backward.
    model.train(training)
    return [name for name, gradient in zip(trainable, gradients, strict=True) if gradient is None]


def _replicate(model: DualEncoder, processes: Processes, blank_text: Tensor) -> DistributedDataParallel:
    if idle := _idle(model, blank_text):
        # DDP would wait for their gradients. They keep their values, as under the other engines.
        log.warning("nothing depends on these parameters; they stay as they are: %s", ", ".join(idle))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, idle)
    return DistributedDataParallel(
        model,
        device_ids=[processes.device] if processes.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # The weights have just come from rank 0.
        init_sync=False,
        # Statistics are each rank's own until a save, or synchronised by the layers themselves.
        forward_sync_buffers=False,
    )
