"""From the settings to everything that a run consists of: built in order, each phase with its seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.batch_norm import convert_batch_norm
from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.factory import ModelSpec
from shardclip.models.locking import lock, trainable_table
from shardclip.training import config as configuration
from shardclip.training.checkpoint import Checkpoints, TrainState
from shardclip.training.checkpoint.storage import any_path
from shardclip.training.config import TrainConfig
from shardclip.training.data.config import DataConfig
from shardclip.training.data.counting import count_remote, total
from shardclip.training.data.image_input import ImageInput, normalise
from shardclip.training.data.loader import TrainLoader, train_loader
from shardclip.training.data.samples import Tokenizer
from shardclip.training.distributed import Processes
from shardclip.training.ema import Ema
from shardclip.training.evaluation.run import check_data
from shardclip.training.loss_scale import LossScale
from shardclip.training.objective import Objective
from shardclip.training.optimizer import ParameterPlan, build_optimizer, plan_parameters
from shardclip.training.parallel import Engine, ParallelConfig, parallelize
from shardclip.training.schedule import Schedule, build_schedule
from shardclip.training.step import TrainingStep
from shardclip.training.teacher import build_teacher
from shardclip.training.throughput import PairFlops, forward_flops
from shardclip.training.update import Update

log = logging.getLogger(__name__)

_TEXT_TOWER = {
    (False, True): "causal, features at the end mark: captions are packed, padding is not computed",
    (False, False): "causal, features at the end mark: captions are cut to the longest of the batch",
    (True, False): "may see padding: captions are computed as long as the context",
}
"""What is done with padding: whether the tower sees it, and whether captions can be packed."""


@dataclass
class Run:
    """What the loop works with."""

    config: TrainConfig
    processes: Processes
    folder: Path
    spec: ModelSpec
    image_input: ImageInput
    tokenize: Callable[[list[str]], Tensor]
    engine: Engine
    step: TrainingStep
    schedule: Schedule
    loader: TrainLoader
    checkpoints: Checkpoints
    state: TrainState
    length: Length
    ema: Ema | None
    flops: PairFlops | None


@dataclass(frozen=True)
class Length:
    """How long a run is, rounded once to whole steps."""

    samples_per_epoch: int
    epochs: int
    global_batch: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run: the last one is whole, so the run may see a few samples more."""
        return -(-self.samples_per_epoch * self.epochs // self.global_batch)

    @property
    def samples(self) -> int:
        """Samples of the whole run."""
        return self.steps * self.global_batch

    def __str__(self) -> str:
        asked = self.samples_per_epoch * self.epochs
        more = self.samples - asked
        return (
            f"{self.epochs} epochs of {self.samples_per_epoch:,} samples are {asked:,}; "
            f"{self.steps:,} steps of {self.global_batch:,} are {self.samples:,} ({more:,} more)"
        )


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log how long a phase of the start takes."""
    began = time.perf_counter()
    yield
    log.info("%-12s %6.1f s", name, time.perf_counter() - began)


def run_folder(config: TrainConfig, processes: Processes) -> Path:
    """The run's folder, the same on all ranks, made if it is not there.

    Raises:
        UserError: it holds another run, and --resume was not given.
    """
    with processes.together("making the run's folder"):
        name = config.run.name or _default_name(config, processes)
        folder = Path(config.run.output_dir, name)
        if processes.is_primary:
            if (folder / "config.yaml").exists() and config.checkpoint.resume is None:
                raise UserError(
                    f"{folder} holds a run already: give another --name, or go on with it by --resume latest"
                )
            folder.mkdir(parents=True, exist_ok=True)
    return folder


def _default_name(config: TrainConfig, processes: Processes) -> str:
    moment = processes.broadcast_object(time.strftime("%Y_%m_%d-%H_%M_%S"))
    model = Path(config.model.model_config or config.model.model).stem.replace("/", "-")
    parts = [
        moment,
        f"model_{model}",
        f"lr_{config.optimizer.lr}",
        f"b_{config.run.batch_size}",
        f"p_{config.parallel.precision}",
    ]
    return "-".join(parts)


def start_run(config: TrainConfig, folder: Path, processes: Processes) -> Run:
    """Build the run and, when asked, take it up from a checkpoint.

    Raises:
        UserError: settings, data or weights cannot be used; on all ranks alike.
    """
    with phase("model"), processes.together("building the model"):
        spec = factory.resolve(config.model, sigmoid=config.objective.siglip)
        tokenize = factory.tokenizer(spec)
        blank_text = tokenize([""])
        image_input = ImageInput.from_preprocess_cfg(spec.preprocess_cfg)
        source = factory.build(spec, config.model, seed=config.run.seed) if processes.is_primary else None
        model = factory.build_meta(spec)
        convert_batch_norm(model, synchronised=config.parallel.use_bn_sync)
        lock(model, config.lock)
        plan = plan_parameters(model, config.optimizer)
        objective = Objective(config.objective, spec)
        flops = _report(spec, model, plan, image_input, blank_text) if processes.is_primary else None
    with phase("engine"), processes.together("laying the model over the processes"):
        engine = parallelize(model, config.parallel, processes, source=source, blank_text=blank_text)
        del source
        optimizer = build_optimizer(engine.module, plan, config.optimizer)
        teacher = build_teacher(config.objective, spec, processes.device, engine.compute_dtype)
        _report_precision(engine, config.parallel)
    with phase("data"):
        loader, length = open_data(config, image_input, tokenize, processes)
        check_data(config.evaluation, config.data, image_input, tokenize, processes)
    scaler = LossScale(processes.device, 2.0**16) if engine.compute_dtype == torch.float16 else None
    ema = None
    if config.ema.ema_decay is not None:
        ema = Ema(engine.module, config.ema.ema_decay, config.ema.ema_warmup)
    torch.manual_seed(config.run.seed + processes.rank)
    with phase("resume"):
        state = TrainState(engine.module, optimizer, ema=ema, scaler=scaler)
        place = config.remote.checkpoint_dir or folder / "checkpoints"
        checkpoints = Checkpoints(place, config.checkpoint, processes, remote=config.remote)
        _resume(checkpoints, state, loader, length, configuration.as_dict(config))
    update = Update(optimizer, processes.device, config.optimizer.grad_clip_norm, scaler)
    step = _training_step(
        config, spec, image_input, engine, objective, update, processes, blank_text, teacher
    )
    schedule = build_schedule(
        config.optimizer,
        total_samples=length.samples,
        epoch_samples=length.samples_per_epoch,
        global_batch=length.global_batch,
        first_global_batch=state.progress["first_global_batch"],
    )
    if processes.is_primary:
        _save_settings(config, spec, folder)
    return Run(
        config, processes, folder, spec, image_input, tokenize, engine, step, schedule, loader, checkpoints,
        state, length, ema, flops,
    )  # fmt: skip


def open_data(
    config: TrainConfig, image_input: ImageInput, tokenize: Tokenizer, processes: Processes
) -> tuple[TrainLoader, Length]:
    """The training data and how long a run on it is, once all ranks have found the same.

    Raises:
        UserError: the data cannot be used, or differs between ranks; on all ranks alike.
    """
    counted = _count_remote(config.data, processes)
    with processes.together("opening the training data"):
        loader, length = _open_data(config, image_input, tokenize, processes, counted)
    _check_alike(f"{loader.seen()}, {length.steps:,} steps", processes)
    return loader, length


def _check_alike(seen: str, processes: Processes) -> None:
    """Compare what this rank has found with what the others have: the order of the data is made of it, and
    ranks with different numbers of steps would wait for each other in vain.

    Raises:
        UserError: it differs; on all ranks.
    """
    ranks: dict[str, list[str]] = {}
    for rank, (host, found) in enumerate(processes.all_gather_object((processes.host, seen))):
        ranks.setdefault(found, []).append(f"{rank} ({host})")
    if len(ranks) == 1:
        return
    views = [f"rank {', '.join(those[:8])}: {found}" for found, those in ranks.items()]
    raise UserError(
        f"the ranks do not see the same training data. {'; '.join(views[:4])}. `shardclip doctor`, started "
        "on all hosts as this run is, tells which shards are missing or differ."
    )


def _count_remote(config: DataConfig, processes: Processes) -> list[int] | None:
    """Samples of each source of remote shards, of which each rank counts a share; None where nothing is to be
    counted."""
    with processes.together("counting the remote shards"):
        share = count_remote(config, processes.rank, processes.world_size)
    shares = [share for share in processes.all_gather_object(share) if share is not None]
    return total(shares) if shares else None


def _open_data(
    config: TrainConfig,
    image_input: ImageInput,
    tokenize: Tokenizer,
    processes: Processes,
    counted: list[int] | None,
) -> tuple[TrainLoader, Length]:
    local_batch = config.run.batch_size * config.run.accum_freq
    loader = train_loader(
        config.data,
        image_input,
        tokenize,
        batch_size=local_batch,
        rank=processes.rank,
        world_size=processes.world_size,
        seed=config.run.seed,
        counted=counted,
        pin_memory=processes.device.type == "cuda",
    )
    length = Length(loader.samples_per_epoch, config.run.epochs, local_batch * processes.world_size)
    log.info("length: %s", length)
    return loader, length


def _training_step(
    config: TrainConfig,
    spec: ModelSpec,
    image_input: ImageInput,
    engine: Engine,
    objective: Objective,
    update: Update,
    processes: Processes,
    blank_text: Tensor,
    teacher: DualEncoder | None,
) -> TrainingStep:
    return TrainingStep(
        engine,
        objective,
        update,
        processes,
        pixels=lambda images: normalise(images, image_input),
        blank_text=blank_text,
        blank_image=torch.zeros(1, 3, *image_input.size, dtype=torch.uint8, device=processes.device),
        pad_id=factory.pad_id(spec),
        accumulation=config.run.accum_freq,
        teacher=teacher,
    )


def _save_settings(config: TrainConfig, spec: ModelSpec, folder: Path) -> None:
    """Leave in the run's folder, and beside checkpoints elsewhere, what they are read with."""
    configuration.save(config, folder / "config.yaml")
    spec.save(folder / "model.json")
    if config.remote.checkpoint_dir is not None:
        copy = any_path(config.remote.checkpoint_dir) / "model.json"
        copy.write_text((folder / "model.json").read_text(encoding="utf-8"), encoding="utf-8")


def _report(
    spec: ModelSpec, model: DualEncoder, plan: ParameterPlan, image_input: ImageInput, blank_text: Tensor
) -> PairFlops | None:
    """Log what is learnt, and how; FLOPs of the forward pass of one pair."""
    flops = forward_flops(model, image_input.size, blank_text.shape[1])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    counted = "an unknown number of" if flops is None else f"{flops.of(blank_text.shape[1]):,.0f}"
    log.info("model %s: %s parameters, %s forward FLOPs a pair", spec.name, f"{parameters:,}", counted)
    log.info("text tower: %s", _TEXT_TOWER[model.sees_padding, model.end_mark is not None])
    for row in trainable_table(model):
        log.info("group %-44s %15s trainable %15s frozen", row.group, f"{row.trainable:,}", f"{row.frozen:,}")
    for name, tensors, numbers in plan.table():
        log.info("parameters %-28s %6d tensors %15s numbers", name, tensors, f"{numbers:,}")
    log.debug("every parameter's group:\n%s", plan.listing())
    return flops


def _report_precision(engine: Engine, config: ParallelConfig) -> None:
    weights = {str(parameter.dtype).removeprefix("torch.") for parameter in engine.module.parameters()}
    compute = str(engine.compute_dtype or torch.float32).removeprefix("torch.")
    reduced = config.fsdp_gradient_reduction_precision if engine.units else "fp32"
    log.info(
        "engine %s: weights and moments %s, towers compute in %s, gradients are summed in %s",
        engine.kind,
        "/".join(sorted(weights)),
        compute,
        reduced,
    )


def _resume(
    checkpoints: Checkpoints,
    state: TrainState,
    loader: TrainLoader,
    length: Length,
    settings: dict[str, Any],
) -> None:
    """Go on from the checkpoint that the settings name; a new run where `latest` finds none."""
    state.progress.update(
        samples=0,
        steps=0,
        first_global_batch=length.global_batch,
        data=loader.state_dict(),
        evaluating=[],
        config=settings,
    )
    path = checkpoints.to_resume()
    if path is not None:
        checkpoints.load(path, state)
        loader.load_state_dict(state.progress["data"])
        log.info("resumed %s: %s samples seen", path, f"{state.progress['samples']:,}")
    elif checkpoints.config.resume is not None:
        log.info("--resume latest: there is no checkpoint yet, so this is a new run")
