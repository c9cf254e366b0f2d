"""`shardclip train --dry-run`: one small step of the run's own model, data and engine, and a plan."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardclip.errors import UserError
from shardclip.training.checkpoint.remote import RemoteConfig
from shardclip.training.config import TrainConfig
from shardclip.training.distributed import Processes

GIB = 2**30


@dataclass(frozen=True)
class Machines:
    """What the run will have, as one of its processes sees it."""

    ranks: int
    ranks_per_node: int
    memory: int
    """Bytes of one rank: its GPU's, or its share of the host's."""

    @staticmethod
    def of(processes: Processes) -> "Machines":
        """Those of the processes at hand."""
        if processes.device.type == "cuda":
            memory = torch.cuda.get_device_properties(processes.device).total_memory
        else:
            host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            memory = host // processes.local_world_size
        return Machines(processes.world_size, processes.local_world_size, memory)


class Rehearsal:
    """A run in small: `train` on every rank while they are together, then `plan` on each by itself."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._machines: Machines | None = None

    def train(self, config: TrainConfig, processes: Processes) -> int:
        """One step of the run and one checkpoint of it, in a folder that is removed; returns the exit code.

        Every rank calls this. The folder lies beside those of the runs, so that its file system is tried too.

        Raises:
            UserError: what the run itself would raise at its start.
        """
        from shardclip.training.loop import train

        name = processes.broadcast_object(f"dry-run-{os.getpid()}")
        folder = Path(config.run.output_dir, name)
        try:
            _open_evaluation_data(config, processes)
            code = train(shortened(config, folder, processes.world_size), processes)
        finally:
            if processes.is_primary:
                shutil.rmtree(folder, ignore_errors=True)
        if processes.is_primary:
            print("dry run: settings, data, model, one step and one checkpoint are well", flush=True)
            self._machines = Machines.of(processes)
        return code

    def plan(self) -> int:
        """Say what a full step will take of a rank's memory; returns 0, or 1 if that is more than there is.

        Only rank 0 has something to say. The processes of the run have parted before: the simulation takes
        the place of their group.
        """
        if self._machines is None:
            return 0
        try:
            text, fits = planned(self._config, self._machines)
        except UserError as error:
            text, fits = f"the plan cannot be made: {error}", True
        print(f"dry run: {text}", flush=True)
        return 0 if fits else 1


def _open_evaluation_data(config: TrainConfig, processes: Processes) -> None:
    """What the run itself does at its start; the one that is cut short evaluates nothing."""
    from shardclip.models import factory
    from shardclip.training.data.image_input import ImageInput
    from shardclip.training.evaluation.run import check_data

    spec = factory.resolve(config.model, sigmoid=config.objective.siglip)
    image_input = ImageInput.from_preprocess_cfg(spec.preprocess_cfg)
    check_data(config.evaluation, config.data, image_input, factory.tokenizer(spec), processes)


def shortened(config: TrainConfig, folder: Path, world_size: int) -> TrainConfig:
    """The same run, two samples a rank and one step long, in `folder`; it reports to nobody else."""
    workers = min(config.data.workers, 1)
    return replace(
        config,
        run=replace(
            config.run,
            name=folder.name,
            output_dir=str(folder.parent),
            epochs=1,
            batch_size=2,
            accum_freq=1,
            dry_run=False,
        ),
        data=replace(config.data, train_num_samples=2 * world_size, workers=workers, streams=None),
        optimizer=replace(config.optimizer, warmup=0, lr_scheduler="const"),
        checkpoint=replace(config.checkpoint, resume=None),
        remote=RemoteConfig(),
        evaluation=replace(config.evaluation, zeroshot_frequency=0, val_frequency=0, eval_every=None),
        tracking=replace(config.tracking, report_to="", log_every_n_steps=1),
    )


def planned(config: TrainConfig, machines: Machines) -> tuple[str, bool]:
    """What a step of the whole batch takes of a rank, in words, and whether the rank has it.

    Raises:
        UserError: the model cannot be simulated.
    """
    from shardclip.models import factory
    from shardclip.training.planning import fitting
    from shardclip.training.planning.extrapolation import predict
    from shardclip.training.planning.simulation import World, simulated

    if dist.is_initialized():
        # FSDP makes a group for one process too, and nobody took it down.
        dist.destroy_process_group()
    world = World(machines.ranks, machines.ranks_per_node)
    spec = factory.resolve(config.model, sigmoid=config.objective.siglip)
    with simulated(world):
        needed = fitting.memory(predict(config, spec, world), config)
    fits = needed.peak <= machines.memory
    kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in needed.by_kind.items() if size)
    lines = [
        f"planned: {needed.peak / GIB:.2f} GiB of {machines.memory / GIB:.2f} on each of {machines.ranks} "
        f"ranks, fullest in {needed.phase} ({kinds})"
    ]
    if not fits:
        lines.append(
            "that does not fit. `shardclip plan`, with the same flags, --gpus "
            f"{machines.ranks} and --gpu-memory {machines.memory / GIB:.0f}, says what to change"
        )
    return "\n".join(lines), fits
