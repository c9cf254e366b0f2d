"""Our contrastive losses against open_clip's, forward and backward: memory, time, bytes on the wire.

    python scripts/bench/loss.py                 # the sizes of the table: some minutes
    python scripts/bench/loss.py --quick --json

One process plays rank 0 of `--global-batch` / `--local-batch` ranks on torch's fake process group:
collectives return at once, with memory and shapes as they are, so that time and memory are those of one
rank's own work.
The peers are `open_clip.loss.ClipLoss(local_loss=True, gather_with_grad=True)`, their only exact layout with
linear memory, and `open_clip.loss.SigLipLoss()`. Ours includes `gather`.

Memory is the resident high-water mark of a new process, less what it held before and less the features of
the other ranks that each of the two has to hold. Time is CPU time of `--threads` threads, in turns, so that a
busy machine changes it little. Bytes sent are counted from the collectives that are issued, at ring cost.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_clip.loss import ClipLoss, SigLipLoss
from report import Row, compared, in_child, in_turns, parser, show
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardclip.models.losses.gather import gather
from shardclip.models.losses.sigmoid import sigmoid_contrastive
from shardclip.models.losses.softmax import softmax_contrastive
from shardclip.models.losses.tiles import TILE

Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    """One rank of a global batch."""

    local: int
    ranks: int
    width: int
    tile: int

    @property
    def other_features(self) -> int:
        """Bytes of one side's features of the other ranks."""
        return 4 * self.local * (self.ranks - 1) * self.width


def _ours(loss: str, sizes: Sizes, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    samples = torch.arange(sizes.local)
    batch = gather(images, texts, samples, samples, samples)
    if loss == "softmax":
        return softmax_contrastive(images, texts, scale, batch, tile=sizes.tile)
    return sigmoid_contrastive(images, texts, scale, bias, batch, tile=sizes.tile)


def _peer(loss: str, sizes: Sizes, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    if loss == "softmax":
        made = ClipLoss(local_loss=True, gather_with_grad=True, world_size=sizes.ranks)
        return made(images, texts, scale)
    return SigLipLoss(world_size=sizes.ranks)(images, texts, scale, bias)


STEPS: dict[str, Callable[..., Tensor]] = {"ours": _ours, "peer": _peer}


def join(ranks: int) -> None:
    """Become rank 0 of `ranks`, once a process: `torch.distributed.nn` keeps the group that it first saw."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def _leaves(sizes: Sizes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    images, texts = (
        F.normalize(torch.randn(sizes.local, sizes.width, generator=generator), dim=1) for _ in range(2)
    )
    return [leaf.requires_grad_() for leaf in (images, texts, torch.tensor(14.3), torch.tensor(-10.0))]


def _run(which: str, loss: str, sizes: Sizes, leaves: list[Tensor]) -> None:
    STEPS[which](loss, sizes, *leaves).backward()
    for leaf in leaves:
        leaf.grad = None


def cpu_seconds(which: str, loss: str, sizes: Sizes) -> float:
    """CPU seconds of one forward and backward."""
    leaves = _leaves(sizes)
    start = time.process_time()
    _run(which, loss, sizes, leaves)
    return time.process_time() - start


def peak_bytes(which: str, loss: str, sizes: Sizes, threads: int) -> float:
    """Peak resident memory of one forward and backward beyond what was there, others' features apart."""
    torch.set_num_threads(threads)
    join(sizes.ranks)
    _run(
        which, loss, sizes._replace(local=64, tile=32), _leaves(sizes._replace(local=64))
    )  # libraries' own buffers
    leaves = _leaves(sizes)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = _status("VmRSS")
    _run(which, loss, sizes, leaves)
    sides = 1 if (which, loss) == ("peer", "sigmoid") else 2
    return _status("VmHWM") - before - sides * sizes.other_features


def _status(field: str) -> int:
    """Bytes in a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


class Wire(TorchDispatchMode):
    """Bytes that this rank sends in collectives, on a ring (the least that any way needs)."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent = ranks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.sent += self._bytes(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _bytes(self, name: str, args: Any) -> int:
        others = self.ranks - 1
        if name == "_allgather_base_":
            return args[1].nbytes * others
        if name == "allgather_":
            return sum(tensor.nbytes for tensor in args[1]) * others
        if name == "alltoall_":
            return sum(tensor.nbytes for tensor in args[1]) * others // self.ranks
        if name == "allreduce_":
            return 2 * sum(tensor.nbytes for tensor in args[0]) * others // self.ranks
        raise NotImplementedError(f"the bytes of {name}")


def sent_bytes(which: str, sizes: Sizes) -> float:
    """Bytes that one rank sends in one step of the softmax loss."""
    with Wire(sizes.ranks) as wire:
        _run(which, "softmax", sizes, _leaves(sizes))
    return wire.sent


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--global-batch", type=int, default=32_768)
    options.add_argument("--local-batch", type=int, default=4_096)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--tile", type=int, default=TILE)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    shrink = 4 if given.quick else 1
    local, tile = given.local_batch // shrink, given.tile // shrink
    sizes = Sizes(local, given.global_batch // given.local_batch, given.width, tile)
    torch.set_num_threads(given.threads)
    join(sizes.ranks)

    def memory(name: str, loss: str, reach: float) -> Row:
        measured = in_turns(
            *(partial(in_child, peak_bytes, which, loss, sizes, given.threads) for which in STEPS), repeats=1
        )
        return compared(name, "MB", *([b / 1e6 for b in found] for found in measured), reach=reach)

    def timing(name: str, loss: str) -> Row:
        runs = [partial(cpu_seconds, which, loss, sizes) for which in STEPS]
        return compared(name, "CPU s", *in_turns(*runs, repeats=given.repeats), reach=1.0)

    def wire(name: str) -> Row:
        if sizes.ranks == 1:
            return Row(name, "B/sample", "lower", 0.55, reason="one process sends nothing")
        small = sizes._replace(local=64)
        sent = ([sent_bytes(which, small) / small.local] for which in STEPS)
        return compared(name, "B/sample", *sent, reach=0.55)

    grown, base = (
        in_child(peak_bytes, "ours", "softmax", sizes._replace(ranks=ranks), given.threads) / 1e6
        for ranks in (2 * sizes.ranks, max(1, sizes.ranks // 4))
    )
    rows = [
        memory("memory_ratio", "softmax", 0.05),
        timing("time_ratio", "softmax"),
        wire("wire_ratio"),
        compared("memory_growth", "MB", [grown], [base], reach=1.1),
        timing("siglip_time_ratio", "sigmoid"),
        memory("siglip_memory_ratio", "sigmoid", 0.1),
    ]
    show(
        "loss",
        rows,
        repeats=given.repeats,
        packages=("torch", "open_clip_torch", "shardclip"),
        as_json=given.json,
        sizes=sizes._asdict(),
        threads=given.threads,
    )


if __name__ == "__main__":
    sys.exit(main())
