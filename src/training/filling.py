"""From the model that rank 0 built to everyone's weights and buffers, and the proof that they arrived."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardclip.training.distributed import Processes


def materialize(model: nn.Module, *, parameters: torch.device, buffers: torch.device) -> None:
    """Give meta tensors memory on their device, without values, and move the others there.

    Not `to_empty`, which would empty those that have values too.
    """

    def placed(tensor: Tensor) -> Tensor:
        device = parameters if isinstance(tensor, nn.Parameter) else buffers
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    model._apply(placed)


@torch.no_grad()
def send_weights(model: nn.Module, source: nn.Module | None, processes: Processes) -> None:
    """Fill parameters and buffers (also those outside the state dict) from rank 0, a tensor at a time.

    Args:
        model: with memory, plain or sharded.
        source: on rank 0 the same architecture with its values; None elsewhere.
        processes: this run's processes.

    Raises:
        RuntimeError: on all ranks, when what some rank holds now is not what rank 0 sent.
    """
    whole = {} if source is None else {**dict(source.named_parameters()), **dict(source.named_buffers())}
    targets = _tensors(model)
    sent = []
    for name, target in targets.items():
        value = (
            whole[name].to(processes.device)
            if whole
            else torch.empty(target.shape, dtype=target.dtype, device=processes.device)
        )
        if processes.world_size > 1:
            dist.broadcast(value.contiguous(), src=0)
            sent.append(_fingerprint(value))
        if isinstance(target, DTensor):
            part = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(value)
    if processes.world_size > 1 and (wrong := strangers(model, torch.stack(sent), processes)):
        raise RuntimeError(f"{len(wrong)} tensors are not what rank 0 sent: {', '.join(wrong[:5])}")


def strangers(model: nn.Module, sent: Tensor, processes: Processes) -> list[str]:
    """Names of the tensors that differ from what was sent, on some rank; the same on every rank. Collective.

    Args:
        model: filled.
        sent: int64, the fingerprint of each whole tensor, parameters first, as rank 0 sent it.
        processes: this run's processes.
    """
    targets = _tensors(model)
    held = torch.stack([_fingerprint(_local(target)).to(sent.device) for target in targets.values()])
    dist.all_reduce(held)
    dist.broadcast(sent, src=0)
    copies = [_copies(target, processes.world_size) for target in targets.values()]
    equal = held == sent * torch.tensor(copies, device=sent.device)
    return [name for name, same in zip(targets, equal.tolist(), strict=True) if not same]


def fingerprints(model: nn.Module) -> Tensor:
    """What `strangers` compares with, of a plain model."""
    return torch.stack([_fingerprint(tensor) for tensor in _tensors(model).values()])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _fingerprint(tensor: Tensor) -> Tensor:
    """The sum of its bits as integers, []: exact and in any order, so that shards add up to the whole."""
    flat = tensor.detach().reshape(-1)
    words = flat.view(torch.int32) if flat.element_size() % 4 == 0 else flat.view(torch.uint8)
    return words.sum(dtype=torch.int64)


def _copies(tensor: Tensor, world_size: int) -> int:
    """How many times the ranks together hold a tensor."""
    if not isinstance(tensor, DTensor):
        return world_size
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return int(torch.tensor([size for size, placement in sizes if placement.is_replicate()]).prod())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
