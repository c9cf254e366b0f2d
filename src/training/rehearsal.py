"""`shardclip train --dry-run`: one small step of the run's own model, data and engine; nothing is left."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from shardclip.training.config import TrainConfig
from shardclip.training.distributed import Processes


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
        evaluation=replace(config.evaluation, zeroshot_frequency=0, val_frequency=0, eval_every=None),
        tracking=replace(config.tracking, report_to="", log_every_n_steps=1),
    )


def rehearse(config: TrainConfig, processes: Processes) -> int:
    """One step of the run and one checkpoint of it, in a folder that is removed; returns the exit code.

    Every rank calls this. The folder lies beside those of the runs, so that its file system is tried too.

    Raises:
        UserError: what the run itself would raise at its start.
    """
    from shardclip.training.loop import train

    name = processes.broadcast_object(f"dry-run-{os.getpid()}")
    folder = Path(config.run.output_dir, name)
    try:
        code = train(shortened(config, folder, processes.world_size), processes)
    finally:
        if processes.is_primary:
            shutil.rmtree(folder, ignore_errors=True)
    if processes.is_primary:
        print("dry run: settings, data, model, one step and one checkpoint are well", flush=True)
    return code
