"""Fixtures of the tests on a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """The first GPU, with a group of one process on it."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    # cuDNN's convolutions would round fp32 to TF32, and the CPU's do not.
    torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cuda", 0)
    dist.destroy_process_group()
