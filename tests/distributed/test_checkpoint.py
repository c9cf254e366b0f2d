"""Checkpoints under real processes: whole or absent, elastic, a snapshot of when they were asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardclip.models.factory import ModelSpec, build, build_meta
from shardclip.training import distributed
from shardclip.training.checkpoint import CheckpointConfig, Checkpoints, TrainState
from shardclip.training.checkpoint.state import to_tensors
from shardclip.training.parallel import Engine, ParallelConfig, parallelize

TINY = ModelSpec(
    name="tiny",
    model_cfg={
        "embed_dim": 16,
        "init_logit_bias": -10.0,
        "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
    },
    preprocess_cfg={},
)
LAYOUTS = [("none", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4)]


def engine_of(kind: str, **flags: Any) -> Engine:
    processes = distributed.current()
    shard_size = {"fsdp_shard_size": 2} if kind == "hsdp" else {}
    config = ParallelConfig(distributed_engine=kind, precision="fp32", **shard_size, **flags)
    source = build(TINY, seed=7) if processes.rank == 0 else None
    blank = torch.zeros(1, 8, dtype=torch.int64)
    return parallelize(build_meta(TINY), config, processes, source=source, blank_text=blank)


def state_of(kind: str, seed: int = 0, frozen: tuple[str, ...] = (), **flags: Any) -> TrainState:
    torch.manual_seed(seed)
    engine = engine_of(kind, **flags)
    for name, parameter in engine.module.named_parameters():
        parameter.requires_grad_(not name.removeprefix("module.").startswith(frozen or ("-",)))
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=False)
    return TrainState(engine.module, optimizer, progress={"samples_seen": 0})


def step(state: TrainState, towers: tuple[str, ...] = ("image", "text"), seed: int = 0) -> float:
    """One optimizer step on a batch that all ranks share, so that every layout takes the same one."""
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


def checkpoints(folder: Path, **config: Any) -> Checkpoints:
    return Checkpoints(folder, CheckpointConfig(**config), distributed.current())


def train_and_save(folder: Path, kind: str) -> tuple[dict[str, Tensor], float]:
    state = state_of(kind)
    for number in range(3):
        step(state, seed=number)
    state.progress.update(samples_seen=12, loader={"stream": [1, 2]})
    saver = checkpoints(folder)
    saver.save(12, state)
    saved = whole(state)
    saver.close()
    return saved, step(state, seed=3)


def load_and_step(folder: Path, kind: str) -> tuple[dict[str, Tensor], float, dict[str, Any]]:
    state = state_of(kind, seed=1)
    loader = checkpoints(folder)
    path = loader.latest()
    assert path is not None
    loader.load(path, state)
    return whole(state), step(state, seed=3), state.progress


@pytest.mark.parametrize(("kind", "world"), LAYOUTS, ids=lambda value: str(value))
def test_b47_b14_saved_under_one_layout_and_resumed_under_all(
    ranks: Any, tmp_path: Path, kind: str, world: int
):
    saved, next_loss = ranks(world).run(train_and_save, tmp_path, kind)[0]
    assert saved["optimizer.logit_scale.exp_avg"].shape == ()
    assert saved["optimizer.logit_scale.exp_avg"].abs() > 0
    for other_kind, other_world in LAYOUTS:
        for loaded, loss, progress in ranks(other_world).run(load_and_step, tmp_path, other_kind):
            assert loaded.keys() == saved.keys()
            different = [key for key in saved if not torch.equal(saved[key], loaded[key])]
            assert different == []
            assert loss == pytest.approx(next_loss, abs=1e-6)
            assert progress == {"samples_seen": 12, "loader": {"stream": [1, 2]}}
