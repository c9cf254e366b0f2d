"""Memory of a process under FSDP: its state against the ideal share, its peak against DDP.

    python scripts/bench/fsdp_memory.py [--json] [--quick] [--repeats N]

A CLIP of 180M parameters takes two AdamW steps in fp32 on gloo processes that are started for each figure.
State is the resident memory of a process at the second update, when weights, gradients and both moments are
there and nothing else is, less what it held before the model; the ideal is 16 bytes a parameter over the
processes. The peak is the high-water mark of the whole process, start and libraries included. Each figure is
that of the process with most. Four processes under DDP take 18 GiB together. Freed blocks of 64 KiB or more
go back to the system (`mallopt`): what is resident is in use.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Row, compared, in_ranks, in_turns, parser, show
from torch import Tensor

from shardclip.models.factory import ModelSpec, build, build_meta
from shardclip.training import distributed
from shardclip.training.data.batch import Batch
from shardclip.training.objective import Objective, ObjectiveConfig
from shardclip.training.parallel import ParallelConfig, parallelize
from shardclip.training.step import TrainingStep
from shardclip.training.update import Update

SIZE, LENGTH, LOCAL_BATCH = 64, 16, 4
BYTES_PER_PARAMETER = 16
"""fp32 weight, gradient and two moments."""


def spec(width: int, layers: int) -> ModelSpec:
    """A CLIP; 180M parameters with width 1024 and 12 layers."""
    vision = {"image_size": SIZE, "layers": layers, "width": width, "head_width": 64, "patch_size": 16}
    text = {"context_length": LENGTH, "vocab_size": 8192, "width": 512, "heads": 8, "layers": layers // 2}
    return ModelSpec("bench", {"embed_dim": 512, "vision_cfg": vision, "text_cfg": text}, {})


def batch() -> Batch:
    """Pairs of noise and one word."""
    rows = torch.arange(LOCAL_BATCH)
    images = torch.randint(0, 256, (LOCAL_BATCH, 3, SIZE, SIZE), dtype=torch.uint8)
    texts = torch.ones(LOCAL_BATCH, LENGTH, dtype=torch.int64)
    return Batch(images, texts, rows, rows, rows, ["key"] * LOCAL_BATCH)


def training_step(model: ModelSpec, engine: str) -> TrainingStep:
    """What `shardclip train` makes of such a model."""
    processes = distributed.current()
    source = build(model) if processes.is_primary else None
    blank = torch.ones(1, LENGTH, dtype=torch.int64)
    config = ParallelConfig(distributed_engine=engine, precision="fp32")  # type: ignore[arg-type]
    laid = parallelize(build_meta(model), config, processes, source=source, blank_text=blank)

    def pixels(images: Tensor) -> Tensor:
        return images.float() / 255

    return TrainingStep(
        laid,
        Objective(ObjectiveConfig(), model),
        Update(torch.optim.AdamW(laid.module.parameters(), fused=True), processes.device),
        processes,
        pixels=pixels,
        blank_text=blank,
        blank_image=torch.zeros(1, 3, SIZE, SIZE, dtype=torch.uint8),
    )


def resident(field: str) -> int:
    """Bytes in a field of /proc/self/status, after what is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(rank: int, ranks: int, engine: str, quick: bool, folder: str) -> None:
    """One process of a figure; rank 0 leaves state, peak and parameters in a file."""
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 2**16)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    training_step(spec(64, 2), engine)(batch())  # libraries' own buffers
    before = resident("RssAnon")
    step = training_step(spec(256, 4) if quick else spec(1024, 12), engine)
    step(batch())
    states: list[int] = []
    step.update.optimizer.register_step_pre_hook(lambda *_: states.append(resident("RssAnon") - before))
    step(batch())
    most = torch.tensor([states[0], resident("VmHWM")])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in step.engine.module.parameters())
        torch.save(
            {"state": most[0].item(), "peak": most[1].item(), "parameters": parameters}, f"{folder}/found"
        )
    dist.destroy_process_group()


def run(engine: str, ranks: int, quick: bool) -> dict[str, Any]:
    """State and peak in bytes, of the process with most, and the number of parameters."""
    folder = tempfile.mkdtemp(prefix="bench-memory-")
    try:
        in_ranks(measure, ranks, ranks, engine, quick, folder)
        return torch.load(f"{folder}/found")
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__, repeats=1).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[Row] = []
    parameters = 0
    for ranks in (2, 4):
        found = [run("fsdp", ranks, options.quick) for _ in range(options.repeats)]
        parameters = found[0]["parameters"]
        ideal = BYTES_PER_PARAMETER * parameters / ranks / 1e6
        states = [each["state"] / 1e6 for each in found]
        rows.append(compared(f"state_over_ideal_{ranks}", "MB", states, [ideal] * len(states), reach=1.15))
    ours, peer = in_turns(
        lambda: run("fsdp", 4, options.quick)["peak"] / 1e6,
        lambda: run("ddp", 4, options.quick)["peak"] / 1e6,
        repeats=options.repeats,
    )
    rows.append(compared("rss_over_ddp", "MB", ours, peer, reach=0.5))
    show(
        "fsdp_memory",
        rows,
        repeats=options.repeats,
        packages=("torch", "open_clip_torch", "shardclip"),
        as_json=options.json,
        parameters=parameters,
    )


if __name__ == "__main__":
    sys.exit(main())
