"""A small model in training under any engine: what the tests of checkpoints save and load."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardclip.models.factory import ModelSpec, build, build_meta
from shardclip.training import distributed
from shardclip.training.checkpoint import CheckpointConfig, Checkpoints, TrainState
from shardclip.training.checkpoint.state import to_tensors
from shardclip.training.checkpoint.storage import AnyPath
from shardclip.training.parallel import Engine, ParallelConfig, parallelize

TINY = ModelSpec(
    name="tiny",
    model_cfg={
        "embed_dim": 16,
        "init_logit_bias": -10.0,
        "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
    },
    preprocess_cfg={},
)


def engine_of(kind: str, spec: ModelSpec = TINY, **flags: Any) -> Engine:
    """A tiny model, laid over the processes that call this."""
    processes = distributed.current()
    shard_size = {"fsdp_shard_size": 2} if kind == "hsdp" else {}
    config = ParallelConfig(distributed_engine=kind, precision="fp32", **shard_size, **flags)  # type: ignore[arg-type]
    source = build(spec, seed=7) if processes.rank == 0 else None
    blank = torch.zeros(1, 8, dtype=torch.int64)
    return parallelize(build_meta(spec), config, processes, source=source, blank_text=blank)


def state_of(kind: str, frozen: str | None = None, **flags: Any) -> TrainState:
    """A state that has not stepped yet. `frozen` is the tower (`visual`, `text`) that is not trained."""
    engine = engine_of(kind, **flags)
    for name, parameter in engine.module.named_parameters():
        if frozen is not None and f"{frozen}." in name:
            parameter.requires_grad_(False)
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    return TrainState(engine.module, torch.optim.AdamW(trained, lr=1e-2, fused=False))


def step(state: TrainState, seed: int = 0, towers: tuple[str, ...] = ("image", "text")) -> float:
    """One optimizer step on a batch that all ranks share, so that every engine takes the same one."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(4, 3, 16, 16, generator=generator)
    text = torch.randint(1, 63, (4, 8), generator=generator)
    out = state.model(image if "image" in towers else None, text if "text" in towers else None)
    loss = out.logit_scale * 1e-2 + out.logit_bias * 1e-2
    for features in (out.image_features, out.text_features):
        if features is not None:
            loss = loss + features.square().mul(torch.arange(16.0)).mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return float(loss.detach())


def whole(state: TrainState) -> dict[str, Tensor]:
    """Copies of all weights and moments, gathered."""
    tensors = to_tensors(state, distributed.current().rank)
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in tensors.items()
        if not key.startswith("rng.")
    }


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Keys whose tensors are not bit-equal, or that only one side has."""
    shared = one.keys() & other.keys()
    return sorted({k for k in shared if not torch.equal(one[k], other[k])} | (one.keys() ^ other.keys()))


def open_checkpoints(folder: Path | str, **config: Any) -> Checkpoints:
    """The checkpoints of the processes that call this."""
    return Checkpoints(folder, CheckpointConfig(**config), distributed.current())


def load_latest(folder: Path | str, state: TrainState) -> AnyPath | None:
    """Fill the state from the newest whole checkpoint; where there is one, its path."""
    checkpoints = open_checkpoints(folder)
    path = checkpoints.latest()
    if path is not None:
        checkpoints.load(path, state)
    return path


def save(folder: Path, samples: int, kind: str = "none") -> dict[str, torch.Tensor]:
    """A checkpoint of a state that depends on `samples`; what it holds."""
    state = state_of(kind)
    step(state, seed=samples)
    checkpoints = open_checkpoints(folder)
    checkpoints.save(samples, state)
    checkpoints.close()
    return whole(state)


def resumed(folder: Path, kind: str = "none") -> tuple[str | None, dict[str, torch.Tensor]]:
    """Name of the checkpoint that a new start takes, and what it loads from it."""
    state = state_of(kind)
    path = load_latest(folder, state)
    return path and path.name, whole(state)
