"""`shardclip plan`: its figures against arithmetic, against the whole depth, against real processes."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardclip.cli import main
from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.factory import ModelSpec
from shardclip.training import config as configuration
from shardclip.training.config import TrainConfig
from shardclip.training.data.batch import Batch
from shardclip.training.data.image_input import ImageInput, normalise
from shardclip.training.distributed import current
from shardclip.training.objective import Objective
from shardclip.training.optimizer import build_optimizer, plan_parameters
from shardclip.training.parallel import lay_out, parallelize
from shardclip.training.planning import PlanConfig, plan, simulation
from shardclip.training.planning.command import split_flags, with_data
from shardclip.training.planning.extrapolation import numbers, predict, with_depths
from shardclip.training.planning.simulation import World, measure, simulated
from shardclip.training.step import TrainingStep
from shardclip.training.update import Update

SMALL: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 5, "width": 64, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 128, "width": 64, "heads": 2, "layers": 4},
}
MEDIUM: dict[str, Any] = {
    "embed_dim": 384,
    "vision_cfg": {"image_size": 64, "layers": 8, "width": 512, "head_width": 64, "patch_size": 8},
    "text_cfg": {"context_length": 32, "vocab_size": 8192, "width": 384, "heads": 6, "layers": 4},
}


def _settings(*words: str) -> TrainConfig:
    synthetic = ("--dataset-type", "synthetic", "--train-num-samples", "64")
    return configuration.parse([*synthetic, "--precision", "fp32", *words])


def _file(folder: Path, model_cfg: dict[str, Any]) -> str:
    path = folder / "model.json"
    path.write_text(json.dumps(model_cfg))
    return str(path)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("--fsdp", "--batch-size", "4"),
        ("--fsdp", "--batch-size", "4", "--grad-checkpointing", "--precision", "amp_bf16"),
        ("--ddp", "--batch-size", "4", "--accum-freq", "3"),
    ],
    ids=["fsdp", "recompute", "accumulation"],
)
def test_a_deep_model_is_the_straight_line_through_shallow_ones(words):
    settings, world = _settings(*words), World(4, 8)
    spec = with_depths(ModelSpec("small", SMALL, {}), image=9, text=7)
    with simulated(world):
        line = numbers(predict(settings, spec, world))
        whole = numbers(measure(settings, spec, world))
    additive = [key for key in whole if key[0] != "peak"]
    assert {key: line[key] for key in additive} == pytest.approx({key: whole[key] for key in additive})
    for phase in ("forward", "backward", "update"):
        peaks = [sum(v for k, v in found.items() if k[:2] == ("peak", phase)) for found in (line, whole)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.02), phase


def test_the_state_is_16_bytes_a_parameter_over_the_shards(tmp_path):
    words = ["--model-config", _file(tmp_path, SMALL), "--fsdp", "--precision", "fp32", "--batch-size", "1"]
    result = plan(words, PlanConfig(gpus=4))
    update = 16 * result.parameters / 4
    with simulated(World(4, 8)):
        found = measure(_settings(*words), ModelSpec("small", SMALL, {}), World(4, 8))
    state = sum(found.peaks["update"][kind] for kind in ("parameters", "gradients", "optimizer moments"))
    assert state == pytest.approx(update, rel=0.01)


@pytest.mark.long
def test_accumulation_keeps_whole_gradients_and_gathers_more():
    world, spec = World(4, 8), ModelSpec("small", SMALL, {})
    with simulated(world):
        once = measure(_settings("--fsdp", "--batch-size", "4"), spec, world)
        thrice = measure(_settings("--fsdp", "--batch-size", "4", "--accum-freq", "3"), spec, world)
    assert thrice.traffic["reduce-scatter"] == once.traffic["reduce-scatter"]
    assert thrice.traffic["all-gather"].count > 3 * once.traffic["all-gather"].count
    assert thrice.peaks["backward"]["gradients"] > 3 * once.peaks["backward"]["gradients"]
    assert thrice.step_flops == pytest.approx(3 * (once.step_flops + once.forward_flops), rel=0.05)


@pytest.mark.parametrize(
    ("words", "machines"),
    [
        ("", (1, 8)),
        ("--nproc 4", (4, 4)),
        ("--nproc=12 --nnodes 2", (24, 12)),
        ("--nproc 8 --gpus 64", (64, 8)),
        ("--gpus 16", (16, 8)),
    ],
)
def test_as_many_gpus_as_the_run_starts_processes(words, machines):
    command, rest = split_flags([*words.split(), "--fsdp", "--batch-size", "4"])
    assert (command.gpus, command.gpus_per_node) == machines
    assert rest == ["--fsdp", "--batch-size", "4"]


def test_machines_without_processes_are_refused():
    with pytest.raises(UserError, match="--nnodes needs --nproc"):
        split_flags(["--nnodes", "2"])


def test_data_is_made_up_where_neither_flags_nor_files_name_any(tmp_path):
    (tmp_path / "run.yaml").write_text("train_data: shards/0.tar\n")
    named = ["--config", "datacomp-large", "--config", str(tmp_path / "run.yaml")]
    assert with_data(named) == named
    for words in (["--config", "datacomp-large"], ["--fsdp"], ["--dataset-type", "webdataset"]):
        assert configuration.parse(with_data(words)).data.dataset_type == "synthetic"


@pytest.mark.long
def test_the_command_prints_json_that_says_what_fits(tmp_path, capsys):
    words = ["plan", "--model-config", _file(tmp_path, SMALL), "--fsdp", "--precision", "fp32"]
    machines = ["--gpus", "16", "--gpu-memory", "1", "--gpu-reserve", "0"]
    assert main([*words, "--batch-size", "512", *machines, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["engine"], result["shard_size"], result["global_batch"]) == ("fsdp", 8, 8192)
    assert sum(result["memory"].values()) == result["peak"] <= result["budget"]
    assert result["changes"] == []
    world, best = World(16, 8), str(result["largest_local_batch"])
    with simulated(world):
        found = predict(_settings("--fsdp", "--batch-size", best), ModelSpec("small", SMALL, {}), world)
    fullest = max(sum(kinds.values()) for kinds in found.peaks.values())
    assert 0.95 * 2**30 < fullest <= 2**30


@pytest.mark.long
def test_a_run_that_does_not_fit_is_told_what_to_change_in_order(tmp_path, capsys):
    words = ["plan", "--model-config", _file(tmp_path, SMALL), "--precision", "fp32", "--batch-size", "64"]
    assert main([*words, "--gpus", "16", "--gpu-memory", "0.004", "--gpu-reserve", "0", "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    flags = [re.findall(r"--[a-z-]+", change["flags"])[-1] for change in changes]
    order = ["--grad-checkpointing", "--fsdp", "--fsdp-shard-size", "--fsdp-cpu-offload", "--accum-freq"]
    assert flags == order[: len(flags)]
    assert [change["fits"] for change in changes[:-1]] == [False] * (len(changes) - 1)


def _calls_per_unit(world_size: int) -> int:
    """Python functions called for one further unit, under the default HSDP."""
    calls = []
    for layers in (2, 2, 3):  # the first fills caches
        spec = ModelSpec("small", {**SMALL, "vision_cfg": {**SMALL["vision_cfg"], "layers": layers}}, {})
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        world = World(world_size, 8)
        with simulated(world):
            model = factory.build_meta(spec)
            gc.disable()
            sys.setprofile(profile)
            lay_out(model, _settings("--fsdp").parallel, world.processes())
            sys.setprofile(None)
            gc.enable()
        calls.append(count)
    return calls[2] - calls[1]


@pytest.mark.long
def test_b08_operations_per_unit_do_not_grow_with_the_world():
    at_64, at_512 = (_calls_per_unit(world) for world in (64, 512))
    assert at_64 > 0
    # Eight times the ranks; a few calls more or less hang on what earlier layouts left in torch's caches.
    assert at_512 <= 1.05 * at_64


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status).group(1))


def _batch(rows: int, size: int, length: int) -> Batch:
    numbers = torch.arange(rows)
    images = torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8)
    captions = torch.ones(rows, length, dtype=torch.int64)
    captions[:, -1] = 2  # the end mark: a plan is for captions that fill the context
    return Batch(images, captions, numbers, numbers, numbers, ["key"] * rows)


def _run_steps(model_cfg: dict[str, Any], words: list[str]) -> None:
    settings, spec = _settings(*words), ModelSpec("model", model_cfg, {"size": 64})
    processes = current()
    model = factory.build_meta(spec)
    planned = plan_parameters(model, settings.optimizer)
    length = model_cfg["text_cfg"]["context_length"]
    blank = torch.ones(1, length, dtype=torch.int64)
    source = factory.build(spec, seed=0) if processes.is_primary else None
    engine = parallelize(model, settings.parallel, processes, source=source, blank_text=blank)
    del source
    size = model_cfg["vision_cfg"]["image_size"]
    step = TrainingStep(
        engine,
        Objective(settings.objective, spec),
        Update(build_optimizer(engine.module, planned, settings.optimizer), processes.device),
        processes,
        pixels=lambda images: normalise(images, ImageInput(size=(size, size))),
        blank_text=blank,
        blank_image=torch.zeros(1, 3, size, size, dtype=torch.uint8),
    )
    batch = _batch(settings.run.batch_size, size, length)
    step(batch)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    step(batch)


def _measured_peak(words: list[str]) -> int:
    """How far the resident memory of this rank rises in a step, above what the libraries take."""
    # Every block of 64 KiB or more goes back to the system when it is freed.
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 2**16)
    _run_steps(SMALL, words)
    gc.collect()
    # What earlier tests of this process have freed, and the heap keeps, is not taken anew from the system.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    _run_steps(MEDIUM, words)
    return _resident("VmHWM") - before


@pytest.mark.long
@pytest.mark.parametrize("engine", ["--fsdp", "--ddp"])
def test_the_plan_is_within_15_percent_of_two_processes(ranks, tmp_path, engine):
    words = [engine, "--batch-size", "8"]
    measured = ranks(2).run(_measured_peak, words)
    model = ["--model-config", _file(tmp_path, MEDIUM), "--precision", "fp32"]
    result = plan([*words, *model], PlanConfig(gpus=2))
    assert result.parameters > 30e6
    assert max(measured) == pytest.approx(result.peak, rel=0.15)


@pytest.mark.long
def test_a_loss_that_was_simulated_before_is_booked_as_it_was():
    world, spec = World(64, 8), ModelSpec("small", SMALL, {})
    settings = _settings("--fsdp", "--batch-size", "24")
    with simulated(world):
        simulation._LOSSES.clear()
        run = measure(settings, spec, world)
        assert len(simulation._LOSSES) == 1
        repeated = measure(settings, spec, world)
    assert repeated == run
    assert run.peaks["loss"]["loss"] > 4 * 2 * 24 * 64 * 32
