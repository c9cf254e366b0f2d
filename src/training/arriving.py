"""Numbers on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Arriving:
    """A number that a device may still be computing; `float` waits for it, and for nothing queued later."""

    def __init__(self, value: Tensor) -> None:
        """Queue the copy of `value` ([]) to the host, and go on."""
        # torch takes pinned memory for it: otherwise the copy itself would wait.
        self._copy = value.detach().to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if value.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._copy)
