"""Evaluation in the middle of training that the next training step does not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardclip.models.dual_encoder import DualEncoder
from shardclip.training.distributed import Processes


@contextmanager
def undisturbed(model: nn.Module, processes: Processes) -> Iterator[DualEncoder]:
    """The module to call for evaluation; afterwards everything that a training step depends on is as before.

    Inside: evaluation mode, no gradients, the same buffers on every rank. Restored: the mode of every
    module (a locked tower may be in evaluation mode for good), buffers, the random number generators, and
    FSDP's sharding. May be nested. Every rank enters it, between two steps.

    The module is the one inside DDP's wrapper: a forward through the wrapper issues collectives, and
    without gradients it makes the wrapper skip the next step's broadcast of buffers.
    """
    inner = cast(DualEncoder, model.module if isinstance(model, DistributedDataParallel) else model)
    modes = {module: module.training for module in inner.modules()}
    buffers = _plain_buffers(inner) if processes.world_size > 1 else []
    own = [buffer.clone() for buffer in buffers]
    with _generators_restored(processes.device):
        try:
            inner.eval()
            for buffer in buffers:
                dist.broadcast(buffer, src=0)
            # Not inference_mode: under FSDP its tensors would be kept and break the next backward.
            with torch.no_grad():
                yield inner
        finally:
            for module, training in modes.items():
                module.training = training
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)
            if isinstance(inner, FSDPModule):
                # A forward without backward leaves the root gathered (an optimizer step would be lost on
                # it) and its units in the order that backward prefetches by.
                inner.reset_iter_state()


def _plain_buffers(model: nn.Module) -> list[Tensor]:
    """Running statistics above all: each rank has its own under FSDP, and between DDP's broadcasts."""
    return [buffer for buffer in model.buffers() if not isinstance(buffer, DTensor)]


@contextmanager
def _generators_restored(device: torch.device) -> Iterator[None]:
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
