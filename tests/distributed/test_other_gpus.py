"""What a rank does with GPUs, as far as a machine without one can tell: nothing with another rank's."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from steps import training_step
from torch import nn
from torch.distributed.checkpoint import filesystem
from train_states import open_checkpoints, state_of

from shardclip.training import parallel, throughput
from shardclip.training.distributed import DistributedConfig, choose_device, current
from shardclip.training.environment import read_environment
from shardclip.training.fetching import Fetched
from shardclip.training.filling import materialize
from shardclip.training.parallel import ParallelConfig


def no_call(*_: Any, **__: Any) -> Any:
    raise AssertionError("this would wait for, or start, a GPU")


def test_a_save_on_the_cpu_leaves_the_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, checkpoints = state_of("none"), open_checkpoints(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", no_call)
    for name in ("get_rng_state", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, no_call)
    for samples in (8, 16):
        checkpoints.save(samples, state)
    checkpoints.close()
    assert [path.name for path in sorted(tmp_path.glob("samples-*"))] == [
        "samples-000000000008",
        "samples-000000000016",
    ]


def test_a_fetching_thread_is_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []

    def items() -> Iterator[list[int]]:
        yield list(chosen)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    fetched = Fetched(items())
    assert fetched.take() == [3]
    fetched.close()


def test_attention_plans_nothing_for_each_new_number_of_captions(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's would: half a second on each rank whenever a batch packs into rows of another number."""
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)
    launch = replace(read_environment({}), local_rank=1)
    assert choose_device(DistributedConfig(), launch) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1), False]


def test_buffers_stand_where_the_towers_compute() -> None:
    """Here that is the meta device, and the parameters are kept on the CPU."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    materialize(model, parameters=torch.device("cpu"), buffers=torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


def timeouts_of_a_mesh() -> list[timedelta]:
    processes = replace(current(), timeout=timedelta(minutes=7))
    mesh = parallel._mesh("hsdp", ParallelConfig(fsdp_shard_size=2), processes)
    return [
        group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[attr-defined]
        for group in mesh.get_all_groups()
    ]


def test_the_groups_of_a_mesh_wait_as_long_as_asked_for(ranks: Any) -> None:
    assert ranks(4).run(timeouts_of_a_mesh) == [[timedelta(minutes=7)] * 2] * 4


def graphs_of_blocks_larger_than_a_bucket() -> int:
    graphs = []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = {"torchcompile": True, "torchcompile_backend": counting}
    step = training_step("clip", "ddp", vision={"width": 512}, **compiled)
    step(tiny.batch([0, 1], [0, 1], 2))
    torch._dynamo.reset()
    return len(graphs)


def test_ddps_buckets_cut_no_compiled_block(ranks: Any) -> None:
    """Two blocks in either tower; DDP's first bucket has 1 MiB, and a block of the image tower 12."""
    assert ranks(2).run(graphs_of_blocks_larger_than_a_bucket) == [4, 4]


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA L4", 121e12), ("NVIDIA L40", 181e12), ("NVIDIA L40S", 362e12)]
)
def test_a_gpu_is_known_by_its_whole_name(name: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert throughput.peak_flops(torch.device("cuda"), torch.bfloat16) == peak
