"""Whether a run fits its GPUs, the largest batch that does, and what to change when it does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardclip.training.config import TrainConfig
from shardclip.training.planning.ledger import ACTIVATIONS, GRADIENTS, KINDS, LOSS, MOMENTS, PARAMETERS
from shardclip.training.planning.simulation import Measured, World

Predict = Callable[[TrainConfig], Measured]
"""From settings to what their step takes."""

_ON_HOST = (PARAMETERS, GRADIENTS, MOMENTS)
"""What --fsdp-cpu-offload keeps in the memory of the host."""


@dataclass(frozen=True)
class Memory:
    """The fullest moment of a step, on one rank."""

    phase: str
    """The phase of the step that it falls in."""
    by_kind: dict[str, int]
    """Bytes on the GPU."""
    host: int
    """Bytes in the memory of the host."""

    @property
    def peak(self) -> int:
        """Bytes on the GPU, all kinds together."""
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Change:
    """Flags that replace or join those of the run, all of the changes before included."""

    flags: str
    memory: Memory
    fits: bool


def memory(found: Measured, config: TrainConfig) -> Memory:
    """The fullest phase of a measured step."""
    host_kinds = _ON_HOST if config.parallel.fsdp_cpu_offload else ()
    on_gpu = {
        phase: {kind: round(kinds.get(kind, 0)) for kind in KINDS if kind not in host_kinds}
        for phase, kinds in found.peaks.items()
    }
    phase = max(on_gpu, key=lambda name: sum(on_gpu[name].values()))
    host = max(sum(kinds.get(kind, 0) for kind in host_kinds) for kinds in found.peaks.values())
    return Memory(phase, on_gpu[phase], round(host))


def largest_batch(config: TrainConfig, found: Measured, budget: int, predict: Predict) -> int:
    """The largest --batch-size whose step takes at most `budget` bytes of the GPU; 0 if none does.

    The memory of a phase is the largest of several straight lines of the batch, so that it bends upwards: the
    answer lies on a chord, whose second point is chosen somewhat above it.
    """
    first = config.run.batch_size
    by_kind = memory(found, config).by_kind
    growing = by_kind[ACTIVATIONS] + by_kind[LOSS]
    guess = int(first * (budget - sum(by_kind.values()) + growing) / max(growing, 1))
    second = min(max(guess + guess // 4, 1), 64 * first)
    if second == first:
        second = first + 1
    other = predict(with_run(config, batch_size=second))
    sizes = []
    for phase in found.peaks.keys() & other.peaks.keys():
        near, far = (_on_gpu(point.peaks[phase], config) for point in (found, other))
        slope = (far - near) / (second - first)
        if slope > 0:
            sizes.append(int(first + (budget - near) // slope))
        elif near > budget:
            sizes.append(0)
    return max(min(sizes, default=0), 0)


def _on_gpu(kinds: dict[str, float], config: TrainConfig) -> float:
    host_kinds = _ON_HOST if config.parallel.fsdp_cpu_offload else ()
    return sum(size for kind, size in kinds.items() if kind not in host_kinds)


def changes(
    config: TrainConfig, world: World, shard_size: int, budget: int, predict: Predict
) -> Iterator[Change]:
    """What makes a run smaller, the cheapest first, each on top of the one before, until one fits."""
    flags: list[str] = []
    for words, parallel in _engine_changes(config, world, shard_size):
        flags.append(words)
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))
        needed = memory(predict(config), config)
        yield Change(" ".join(flags), needed, needed.peak <= budget)
        if needed.peak <= budget:
            return
    samples = config.run.batch_size * config.run.accum_freq
    for size in _smaller(config.run.batch_size):
        smaller = with_run(config, batch_size=size, accum_freq=samples // size)
        needed = memory(predict(smaller), smaller)
        if needed.peak <= budget or size == 1:
            words = f"--batch-size {size} --accum-freq {samples // size}"
            yield Change(" ".join([*flags, words]), needed, needed.peak <= budget)
            return


def _engine_changes(
    config: TrainConfig, world: World, shard_size: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    parallel = config.parallel
    if not (parallel.grad_checkpointing or parallel.fsdp_layers_to_grad_checkpoint):
        yield "--grad-checkpointing", {"grad_checkpointing": True}
    if shard_size == 1 and world.gpus > 1:
        yield "--fsdp", {"fsdp": True, "ddp": False, "distributed_engine": None}
        shard_size = min(world.gpus, world.per_node)
    if 1 < shard_size < world.gpus:
        yield f"--fsdp-shard-size {world.gpus}", {"fsdp_shard_size": world.gpus}
    if shard_size > 1 and not parallel.fsdp_cpu_offload:
        yield "--fsdp-cpu-offload", {"fsdp_cpu_offload": True}


def _smaller(batch: int) -> Iterator[int]:
    """Halves of the batch, as long as they are whole, then 1."""
    while batch > 1:
        batch = batch // 2 if batch % 2 == 0 else 1
        yield batch


def with_run(config: TrainConfig, **values: Any) -> TrainConfig:
    """The settings with other values of the run's own."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **values))
