"""`shardclip plan FLAGS OF A RUN --gpus N --gpu-memory GiB`: what the run will need of each GPU.

The engine, the optimizer and the loss are the run's own; the other ranks, the GPU and the values of tensors
are not there (torch's fake process group and fake tensors).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from shardclip.errors import UserError
from shardclip.launch import LaunchConfig, take_flags

GIB = 2**30


@dataclass(frozen=True)
class PlanConfig:
    """The machines to plan for; every flag of `shardclip train` may stand beside these."""

    gpus: int = 1
    """GPUs of the whole run; where --nproc is given, --nproc times --nnodes."""
    gpus_per_node: int = 8
    """GPUs of one machine; where --nproc is given, as many."""
    gpu_memory: float = 80.0
    """Memory of one GPU, in GiB."""
    gpu_reserve: float = 2.0
    """GiB of it that are left for what is not simulated: CUDA's context, NCCL, cuBLAS, fragmentation."""
    json: bool = False
    """Print one JSON object instead of text."""
    full_depth: bool = False
    """Simulate every block, instead of three shallow models and a straight line."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise UserError("--gpus and --gpus-per-node must be 1 or more")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise UserError(f"--gpus {self.gpus} is not a multiple of --gpus-per-node {self.gpus_per_node}")
        if self.gpu_memory <= self.gpu_reserve:
            raise UserError(
                f"--gpu-memory {self.gpu_memory:g} leaves nothing beside --gpu-reserve {self.gpu_reserve:g}"
            )

    @property
    def budget(self) -> int:
        """Bytes that a step may take of a GPU."""
        return int((self.gpu_memory - self.gpu_reserve) * GIB)


@dataclass(frozen=True)
class Plan:
    """What a run will need; sizes in bytes, of one rank."""

    model: str
    parameters: int
    engine: str
    gpus: int
    shard_size: int
    local_batch: int
    """Samples per rank and micro-batch."""
    global_batch: int
    peak: int
    peak_phase: str
    """The phase of the step in which most memory is held."""
    memory: dict[str, int]
    """By kind, at the peak."""
    host_memory: int
    collectives: dict[str, dict[str, int]]
    """Kind -> count and bytes per step."""
    forward_flops_per_sample: int
    step_flops_per_sample: int
    """Forward, backward and what is computed again."""
    budget: int
    """What a step may take: the GPU's memory less the reserve."""
    fits: bool
    largest_local_batch: int
    changes: list[dict[str, Any]]
    """Flags to add, each line with those before; empty if the run fits."""
    cpu_seconds: float
    """What the plan took to make."""


def main(argv: Sequence[str]) -> int:
    """`shardclip plan`: 0 if the run fits, 1 if it does not."""
    if "-h" in argv or "--help" in argv:
        tyro.cli(PlanConfig, args=["--help"], prog="shardclip plan")
    command, words = split_flags(argv)
    logging.getLogger("shardclip").setLevel(logging.ERROR)
    result = plan(words, command)
    if command.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        from shardclip.training.planning.report import report

        print(report(result))
    return 0 if result.fits else 1


def split_flags(argv: Sequence[str]) -> tuple[PlanConfig, list[str]]:
    """The plan's own flags, and those of the run; flags that start processes say how many GPUs there are."""
    words = [word.replace("_", "-") if word.startswith("--") and "=" not in word else word for word in argv]
    # Not `split_launch_flags`: nothing starts here, so the machines need no meeting point.
    launch, words = take_flags(LaunchConfig, words)
    machines = PlanConfig()
    if launch.nproc is not None:
        machines = PlanConfig(gpus=launch.nproc * launch.nnodes, gpus_per_node=launch.nproc)
    elif launch.nnodes != 1:
        raise UserError("--nnodes needs --nproc, the GPUs of each machine; or give --gpus alone")
    return tyro.cli(PlanConfig, args=words, prog="shardclip plan", default=machines, return_unknown_args=True)


def with_data(words: Sequence[str]) -> Sequence[str]:
    """The flags of a run, and made-up data if neither they nor their files name any: a plan reads none."""
    from shardclip.training import config as configuration

    data = configuration.read(words).config.data
    if data.train_data is not None or data.dataset_type == "synthetic":
        return words
    return [*words, "--dataset-type", "synthetic", "--train-num-samples", "1"]


def plan(words: Sequence[str], command: PlanConfig) -> Plan:
    """The plan of the run that `shardclip train` with `words` would start.

    Raises:
        UserError: the settings are wrong, or the model cannot be simulated.
    """
    from shardclip.models import factory
    from shardclip.training import config as configuration
    from shardclip.training.parallel import shard_size
    from shardclip.training.planning import fitting
    from shardclip.training.planning.extrapolation import predict
    from shardclip.training.planning.simulation import World, simulated

    began = time.process_time()
    config = configuration.parse(with_data(words), beside=(PlanConfig, LaunchConfig))
    spec = factory.resolve(config.model, sigmoid=config.objective.siglip)
    world = World(command.gpus, command.gpus_per_node)
    engine = config.parallel.engine(world.gpus)
    size = shard_size(engine, config.parallel, world.processes())

    def step(settings: configuration.TrainConfig) -> Any:
        return predict(settings, spec, world, full_depth=command.full_depth)

    with simulated(world):
        found = step(config)
        needed = fitting.memory(found, config)
        fits = needed.peak <= command.budget
        largest = fitting.largest_batch(config, found, command.budget, step)
        changed = [] if fits else list(fitting.changes(config, world, size, command.budget, step))
    local = config.run.batch_size * config.run.accum_freq
    return Plan(
        model=spec.name,
        parameters=sum(parameter.numel() for parameter in factory.build_meta(spec).parameters()),
        engine=engine,
        gpus=world.gpus,
        shard_size=size,
        local_batch=config.run.batch_size,
        global_batch=local * world.gpus,
        peak=needed.peak,
        peak_phase=needed.phase,
        memory=needed.by_kind,
        host_memory=needed.host,
        collectives={
            kind: {"count": round(sent.count), "bytes": round(sent.bytes)}
            for kind, sent in sorted(found.traffic.items())
        },
        forward_flops_per_sample=round(found.forward_flops / config.run.batch_size),
        step_flops_per_sample=round(found.step_flops / local),
        budget=command.budget,
        fits=fits,
        largest_local_batch=largest,
        changes=[
            {"flags": change.flags, "peak": change.memory.peak, "fits": change.fits} for change in changed
        ],
        cpu_seconds=round(time.process_time() - began, 1),
    )
