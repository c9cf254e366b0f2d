"""Where the host would wait for a device, found on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardclip.models import dual_encoder
from shardclip.models.losses import gather
from shardclip.training import step

_READ = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero",
    "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip
"""Operations whose result, or its size, the host has to know before it goes on."""
_CHOOSING = {"index", "index_put", "index_put_"}
"""Operations that are among them if they choose by a mask."""


class Waits(TorchDispatchMode):
    """Notes in `found` what reads values of a device's tensors.

    The device's are those that were `marked`, and all that is computed from them.
    """

    def __init__(self, marked: Iterable[Tensor]) -> None:
        super().__init__()
        self.found: list[str] = []
        # Kept, so that no other storage takes the place of one that is gone.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.mark(marked)

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """These are the device's."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            self._storages[storage._cdata] = storage

    def is_marked(self, tensor: Tensor) -> bool:
        """Whether this is the device's."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Taken apart by DTensor itself; its local operations come here one by one.
            return NotImplemented
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func.overloadpacket.__name__
        of_device = any(map(self.is_marked, given))
        by_mask = name in _CHOOSING and any(
            t.dtype == torch.bool for t in tree_leaves(args[1]) if t is not None
        )
        if of_device and (name in _READ or by_mask):
            self.found.append(name)
        out = func(*args, **(kwargs or {}))
        if of_device:
            written = [
                value
                for value, argument in zip(args, func._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self.mark(leaf for leaf in tree_leaves((out, written)) if isinstance(leaf, Tensor))
        return out


class _Reading(TorchFunctionMode):
    """Notes the readings that no dispatch mode sees."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy") and self.waits.is_marked(args[0]):
            self.waits.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits_for(marked: Iterable[Tensor]) -> Iterator[list[str]]:
    """What is read, inside, of `marked`, of what is sent to the device, and of all that comes from these."""
    waits = Waits(marked)

    def sent(tensor: Tensor, device: torch.device) -> Tensor:
        copy = tensor.to(device, copy=True)
        waits.mark([copy])
        return copy

    with ExitStack() as stack:
        for user in (gather, dual_encoder, step):
            stack.enter_context(patch.object(user, "sent", sent))
        stack.enter_context(_Reading(waits))
        stack.enter_context(waits)
        yield waits.found
