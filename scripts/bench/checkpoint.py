"""How long training stands still for a checkpoint: ours against gathering the state and `torch.save`.

    python scripts/bench/checkpoint.py [--json] [--quick] [--repeats N]

Two processes share a CLIP of 100M parameters with its AdamW moments under FSDP. Ours: the call of
`Checkpoints.save`, which returns when the state is copied and writes it beside training; the write is waited
for between the measurements, outside both. Peer: what open_clip does at the end of an epoch, rank 0 writes
one file of the whole state by `torch.save` and the others wait; gathered as torch's own
`get_state_dict(full_state_dict=True, cpu_offload=True)` does. Each figure is that of the slower rank.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from report import compared, in_ranks, in_turns, parser, show
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shardclip.models.factory import ModelSpec, build, build_meta
from shardclip.training import distributed
from shardclip.training.checkpoint import CheckpointConfig, Checkpoints, TrainState
from shardclip.training.parallel import ParallelConfig, parallelize

RANKS = 2


def spec(quick: bool) -> ModelSpec:
    """100M parameters, or 7M."""
    width, layers, words = (768, 10, 24_000) if not quick else (256, 3, 10_000)
    vision = {"image_size": 64, "layers": layers, "width": width, "head_width": 64, "patch_size": 16}
    text = {"context_length": 16, "vocab_size": words, "width": 384, "heads": 6, "layers": layers}
    return ModelSpec("bench", {"embed_dim": 512, "vision_cfg": vision, "text_cfg": text}, {})


def trained_state(quick: bool) -> TrainState:
    """A sharded model whose optimizer has moments."""
    processes = distributed.current()
    source = build(spec(quick)) if processes.rank == 0 else None
    config = ParallelConfig(fsdp=True, precision="fp32")
    blank = torch.zeros(1, 16, dtype=torch.int64)
    engine = parallelize(build_meta(spec(quick)), config, processes, source=source, blank_text=blank)
    optimizer = torch.optim.AdamW(engine.module.parameters())
    for parameter in engine.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(engine.module, optimizer)


def slowest(action: Callable[[], None]) -> float:
    """Seconds that the action takes on the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure(rank: int, folder: str, repeats: int, quick: bool) -> None:
    """One process of the comparison; rank 0 leaves the figures in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    state = trained_state(quick)
    checkpoints = Checkpoints(Path(folder, "ours"), CheckpointConfig(keep_last=1), distributed.current())
    peer_file = Path(folder, "peer.pt")
    saves = iter(range(1, repeats + 1))

    def ours() -> float:
        samples = next(saves)
        seconds = slowest(lambda: checkpoints.save(samples, state))
        checkpoints.wait()
        return seconds

    def gather_and_save() -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(state.model, state.optimizer, options=options)
        if rank == 0:
            torch.save({"epoch": 1, "name": "peer", "state_dict": model, "optimizer": optimizer}, peer_file)
        dist.barrier()

    figures = in_turns(ours, lambda: slowest(gather_and_save), repeats=repeats)
    checkpoints.close()
    if rank == 0:
        parameters = sum(p.numel() for p in state.model.parameters())
        torch.save({"figures": figures, "parameters": parameters}, f"{folder}/figures.pt")
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    options = parser(__doc__).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = tempfile.mkdtemp(prefix="bench-checkpoint-")
    try:
        in_ranks(measure, RANKS, folder, options.repeats, options.quick)
        found = torch.load(f"{folder}/figures.pt")
    finally:
        shutil.rmtree(folder)
    ours, peer = found["figures"]
    row = compared("stall_ratio", "s", ours, peer, reach=0.2)
    show(
        "checkpoint",
        [row],
        repeats=options.repeats,
        packages=("torch", "open_clip_torch"),
        as_json=options.json,
        parameters=found["parameters"],
        processes=RANKS,
    )


if __name__ == "__main__":
    main()
