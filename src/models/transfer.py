"""Copies to the device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; the host goes on at once.

    A copy to a GPU from memory that is not pinned would wait for all that the GPU has still to do.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
