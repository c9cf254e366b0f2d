"""Every block of memory of a simulated step, when it came and went, and what it was for.

Under torch's fake tensors an operation has shapes but no values. The ledger watches the operations of this
thread, forward and backward alike, and books each storage that comes out of them. What a block was for may be
known only later (that it became a gradient, say), so the peak is worked out at the end, from the whole book.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

PARAMETERS = "parameters"
GRADIENTS = "gradients"
MOMENTS = "optimizer moments"
AVERAGE = "moving average"
ACTIVATIONS = "activations"
LOSS = "loss"
GATHERED = "gather buffers"
KINDS = (PARAMETERS, GRADIENTS, MOMENTS, AVERAGE, ACTIVATIONS, LOSS, GATHERED)

_COLLECTIVES = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
}


@dataclass
class Block:
    """One storage, or one size of a storage that is emptied and filled again."""

    kind: str
    bytes: int
    born: int
    died: int | None = None


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind."""

    count: float = 0
    bytes: float = 0
    """Of the whole tensor: what an all-gather puts out, what a reduce-scatter or an all-reduce takes in."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(self.count * factor, self.bytes * factor)


@dataclass(frozen=True)
class Cost:
    """What a phase took by itself."""

    bytes: int
    """The most memory that its own blocks held at once."""
    traffic: dict[str, Traffic]
    """By kind of collective."""
    flops: int


class Ledger(TorchDispatchMode):
    """Books memory, collectives and FLOPs of everything that runs inside `with ledger:`, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self.traffic: dict[str, dict[str, Traffic]] = defaultdict(lambda: defaultdict(Traffic))
        """Phase -> kind of collective -> what was sent."""
        self.flops: Counter[str] = Counter()
        """Phase -> FLOPs."""
        self._open: dict[int, Block] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._clock = 0
        self._phases: list[tuple[str, int, int]] = []
        self._phase, self._kind = "before", ACTIVATIONS

    @contextmanager
    def phase(self, name: str, kind: str = ACTIVATIONS) -> Iterator[None]:
        """What happens inside is called `name`; new blocks are of `kind` unless they prove to be another."""
        outer = self._phase, self._kind
        self._phase, self._kind = name, kind
        began = self._clock
        with self, _resizing(self._resized):
            yield
        self._phases.append((name, began, self._clock))
        self._phase, self._kind = outer

    def cost(self, phase: str, kind: str) -> Cost:
        """What `phase` took, of memory its blocks of `kind`."""
        changes = sorted(
            (moment, change)
            for block in self.blocks
            if block.kind == kind
            for moment, change in ((block.born, block.bytes), (block.died, -block.bytes))
            if moment is not None
        )
        held = accumulate(change for _, change in changes)
        return Cost(max(held, default=0), dict(self.traffic[phase]), self.flops[phase])

    def repeat(self, phase: str, kind: str, cost: Cost) -> None:
        """Book `cost` as `phase`, of memory one block of `kind`, without running it again."""
        with self.phase(phase, kind):
            torch.empty(cost.bytes, dtype=torch.uint8)
        self.flops[phase] += cost.flops
        for collective, sent in cost.traffic.items():
            self.traffic[phase][collective] += sent

    def label(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Book the blocks of `tensors` (their local shards) as `kind`, for all of their time."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if (block := self._book(local.untyped_storage())) is not None:
                block.kind = kind

    def label_survivors(self, kind: str, phase: str) -> None:
        """Book as `kind` what was born as an activation in `phase` and is still there."""
        began = min(start for name, start, _ in self._phases if name == phase)
        for block in self._open.values():
            if block.kind == ACTIVATIONS and block.born >= began:
                block.kind = kind

    def peaks(self) -> dict[str, dict[str, int]]:
        """Phase -> bytes of each kind at the moment of the phase when their sum was largest."""
        changes: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for block in self.blocks:
            changes[block.born].append((block.kind, block.bytes))
            if block.died is not None:
                changes[block.died].append((block.kind, -block.bytes))
        held: Counter[str] = Counter()
        peaks: dict[str, dict[str, int]] = {}
        for moment in range(self._clock + 1):
            for kind, size in changes.get(moment, ()):
                held[kind] += size
            for name, began, ended in self._phases:
                if began < moment <= ended and held.total() > sum(peaks.get(name, {}).values()):
                    peaks[name] = dict(held)
        return peaks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Taken apart by DTensor itself; its local operations come here one by one.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._clock += 1
        for tensor in made:
            self._book(tensor.untyped_storage())
        if func.namespace == "fsdp":
            self._mark_buffers([*given, *made])
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.__name__, [*given, *made])
        self.flops[self._phase] += _flops(func, args, kwargs or {}, out)
        return out

    def _book(self, storage: torch.UntypedStorage) -> Block | None:
        key = id(storage)
        if key in self._open:
            return self._open[key]
        if storage.nbytes() == 0:
            return None
        block = self._open[key] = Block(self._kind, storage.nbytes(), self._clock)
        self.blocks.append(block)
        self._watches[key] = weakref.ref(storage, lambda _: self._close(key))
        return block

    def _close(self, key: int) -> None:
        self._watches.pop(key, None)
        if (block := self._open.pop(key, None)) is not None:
            self._clock += 1
            block.died = self._clock

    def _resized(self, storage: torch.UntypedStorage) -> None:
        # FSDP alone empties storages and fills them again: those of gathered parameters.
        self._close(id(storage))
        self._clock += 1
        if (block := self._book(storage)) is not None:
            block.kind = GATHERED

    def _mark_buffers(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            block = self._book(tensor.untyped_storage())
            if block is not None and block.kind == ACTIVATIONS:
                block.kind = GATHERED

    def _count(self, operation: str, tensors: list[Tensor]) -> None:
        kind = next((kind for name, kind in _COLLECTIVES.items() if name in operation), None)
        if kind is not None:
            self.traffic[self._phase][kind] += Traffic(1, max(tensor.nbytes for tensor in tensors))
            if self._kind == ACTIVATIONS:
                self._mark_buffers(tensors)


@contextmanager
def _resizing(told: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `told` after each change of a storage's size, which no dispatch mode sees."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        told(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs by torch's own formulas; its table has no line for the CPU's flash attention."""
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    return 0
