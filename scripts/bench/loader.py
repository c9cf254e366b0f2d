"""The training loader against open_clip's: images per CPU-second and per second, memory, and resuming.

    python scripts/bench/loader.py --peer-python /path/to/venv/bin/python --json

Both read the same generated JPEG shards (1/f pictures, quality 85, about 2 to 3 bits a pixel) with the same
crop, batch and tokenizer, in turns. The peer is `open_clip_train.data.get_data` as installed in the
interpreter of --peer-python (it needs webdataset <= 0.2.86). Each measurement is a fork of a process that has
imported its loader. Counted is the CPU time of the reading processes and of the one that takes their batches,
from a warm state to as many batches later. The peer's batches are normalised float32; ours are uint8, which
the training step normalises on the device.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image
from report import Row, compared, in_turns, parser, show
from shards import caption, photograph, write_shard

SIZES = {"256": (256, 256), "512": (384, 512), "1024": (768, 1024)}
"""Height and width of the pictures, by the name of their row."""
REACH = {"256": 2.0, "512": 2.5, "1024": 4.0}
SIDE = 224


def make_data(folder: Path, quick: bool) -> None:
    """Four shards of each size."""
    chance = np.random.default_rng(0)
    for name, size in SIZES.items():
        pictures = [photograph(size, chance) for _ in range(8 if quick else 32)]
        (folder / name).mkdir()
        for shard in range(4):
            captions = (caption(10, chance) for _ in range(32 if quick else 128))
            write_shard(folder / name / f"{shard:05d}.tar", pictures, captions)


def make_many(folder: Path, quick: bool) -> str:
    """100,000 tiny samples for resuming (a tenth when quick); their folder."""
    chance = np.random.default_rng(0)
    many = folder / "many"
    many.mkdir()
    captions = (caption(10, chance) for _ in range(500 if quick else 5000))
    write_shard(many / "00000.tar", [photograph((16, 16), chance)], captions)
    for shard in range(1, 20):
        shutil.copy(many / "00000.tar", many / f"{shard:05d}.tar")
    return str(many)


def our_loader(data: str, batch: int, workers: int) -> Iterator[Any]:
    """Batches of shardclip's training loader."""
    from open_clip import get_tokenizer

    from shardclip.training.data.config import DataConfig
    from shardclip.training.data.image_input import ImageInput
    from shardclip.training.data.loader import train_loader

    config = DataConfig(train_data=data, workers=workers)
    spec = ImageInput(size=(SIDE, SIDE))
    tokenize = get_tokenizer("ViT-B-32")
    return iter(train_loader(config, spec, tokenize, batch_size=batch, rank=0, world_size=1, seed=0))


def peer_loader(data: str, batch: int, workers: int) -> Iterator[Any]:
    """Batches of open_clip's training loader, through its own entry."""
    from open_clip import get_tokenizer
    from open_clip.transform import image_transform
    from open_clip_train.data import get_data

    arguments = argparse.Namespace(
        train_data=f"{data}/{{00000..00003}}.tar",
        train_num_samples=1_000_000,
        train_data_upsampling_factors=None,
        val_data=None,
        imagenet_val=None,
        imagenet_v2=None,
        dataset_type="webdataset",
        dataset_resampled=False,
        batch_size=batch,
        workers=workers,
        world_size=1,
        rank=0,
        seed=0,
        distributed=False,
    )
    transforms = (image_transform(SIDE, is_train=True), image_transform(SIDE, is_train=False))
    loaders = get_data(arguments, transforms, tokenizer=get_tokenizer("ViT-B-32"))
    return iter(loaders["train"].dataloader)


def cpu_seconds(pid: int) -> float:
    """User and system time of a running process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a running process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children() -> list[int]:
    """Processes that this one has started and that run."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def measure(who: str, data: str, batch: int, workers: int, batches: int) -> dict[str, float]:
    """Run one loader in this process: images per CPU-second and per second, bytes of its largest worker."""
    import torch

    torch.set_num_threads(1)
    batches_of = our_loader(data, batch, workers) if who == "ours" else peer_loader(data, batch, workers)
    for _ in range(2 + 2 * workers):
        next(batches_of)
    pids = [os.getpid(), *children()]
    wall, cpu = time.perf_counter(), sum(map(cpu_seconds, pids))
    for _ in range(batches):
        next(batches_of)
    images = batch * batches
    return {
        "wall": images / (time.perf_counter() - wall),
        "cpu": images / (sum(map(cpu_seconds, pids)) - cpu),
        "bytes": float(max(map(resident_bytes, pids[1:]))),
    }


class Side:
    """An interpreter that has imported one of the loaders and measures it."""

    def __init__(self, python: str, who: str) -> None:
        self._process = subprocess.Popen(
            [python, "-W", "ignore", __file__, "--serve", who],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __call__(self, *numbers: object) -> dict[str, float]:
        """`measure` there.

        Raises:
            RuntimeError: the loader failed; its process has said why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps([str(number) for number in numbers]), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer.strip():
            raise RuntimeError(f"{self._process.args[0]} gave no figures")  # type: ignore[index]
        return json.loads(answer)

    def close(self) -> None:
        """End the interpreter."""
        self._process.communicate()


def serve(who: str) -> None:
    """Measure one loader in a fork of this process for each line of the input; the answers are lines, too."""
    importlib.import_module({"ours": "shardclip.training.data.loader", "peer": "open_clip_train.data"}[who])
    for line in sys.stdin:
        if pid := os.fork():
            if os.waitpid(pid, 0)[1]:
                print(flush=True)  # it failed: an answer without figures
            continue
        data, *numbers = json.loads(line)
        figures = measure(who, data, *map(int, numbers))
        # The workers of endless loaders would finish the batches that they have begun, beside the next one.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's own takes their death for a fault
        for worker in children():
            os.kill(worker, signal.SIGKILL)
        print(json.dumps(figures), flush=True)
        os._exit(0)


def pixel_difference(folder: Path) -> Row:
    """The fast path against Pillow's whole decoding of the same crop, mean absolute, in steps of 255."""
    from shardclip.training.data.decode import Fast, power_of_two_below, resize
    from shardclip.training.data.image_input import ImageInput

    fast = Fast(ImageInput(size=(SIDE, SIDE)), {}, 10**9)
    means = []
    for name, (height, width) in SIZES.items():
        with tarfile.open(folder / name / "00000.tar") as tar:
            pictures = [tar.extractfile(member).read() for member in tar.getmembers()[:16:2]]  # type: ignore[union-attr]
        differences = []
        for seed, content in enumerate(pictures):
            left, top, across, down = fast.crop(width, height, random.Random(seed))
            shrink = power_of_two_below(min(across, down) / SIDE)
            left, top, across, down = (value // shrink * shrink for value in (left, top, across, down))
            box = (left, top, left + across, top + down)
            whole = Image.open(io.BytesIO(content)).convert("RGB")
            exact = np.asarray(whole.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box), dtype=np.int16)
            ours = resize(fast(content, seed), (SIDE, SIDE)).permute(1, 2, 0).numpy().astype(np.int16)
            differences.append(float(np.abs(ours - exact).mean()))
        means.append(float(np.mean(differences)))
    worst = max(means)
    return Row("pixel_difference", "of 255", "lower", 2.0, worst, 1.0, worst, (min(means), worst))


def resume_seconds(data: str, share: float) -> float:
    """From opening the loader to its first batch, resuming at a share of the epoch: the median of three."""
    return median(_resume_seconds(data, share) for _ in range(3))


def _resume_seconds(data: str, share: float) -> float:
    from torch import zeros

    from shardclip.training.data.config import DataConfig
    from shardclip.training.data.image_input import ImageInput
    from shardclip.training.data.loader import train_loader

    def loader() -> Any:
        return train_loader(
            DataConfig(train_data=data, workers=0),
            ImageInput(size=(16, 16)),
            lambda captions: zeros(len(captions), 4).long(),
            batch_size=64,
            rank=0,
            world_size=1,
            seed=0,
        )

    state = loader().state_dict()
    taken = int(share * loader().samples_per_epoch / state["streams"])
    state["positions"] = {number: [0, 0, taken, taken] for number in state["positions"]}
    start = time.perf_counter()
    resumed = loader()
    resumed.load_state_dict(state)
    next(iter(resumed))
    return time.perf_counter() - start


def loader_rows(folder: Path, options: argparse.Namespace, ours_in: Side, peer_in: Side) -> list[Row]:
    """The rows that compare both loaders."""
    found: list[Row] = []
    batches = 2 if options.quick else 8
    for name in SIZES:
        for workers in (1, 2) if name == "512" else (1,):
            numbers = (folder / name, options.batch_size, workers, batches)
            try:
                ours, peer = in_turns(
                    partial(ours_in, *numbers), partial(peer_in, *numbers), repeats=options.repeats
                )
                reason = None
            except RuntimeError as error:
                ours, peer, reason = [], [], f"a loader failed: {error}"
            suffix = "" if workers == 1 else f"_{workers}_workers"
            wanted = [(f"cpu_{name}{suffix}", "cpu", "images/CPU-s", "higher", REACH[name])]
            if name == "512":
                wanted.append(
                    (f"wall_512{suffix}", "wall", "images/s", "higher", 2.5 if workers == 1 else None)
                )
                if workers == 1:
                    wanted.append(("worker_memory", "bytes", "bytes", "lower", 1.2))
            for row, key, unit, better, reach in wanted:
                found.append(
                    compared(
                        row,
                        unit,
                        *([one[key] for one in side] for side in (ours, peer)),
                        better=better,
                        reach=reach,
                    )
                    if reason is None
                    else Row(row, unit, better, reach, reason=reason)
                )
    return found


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2])
    options = parser(__doc__)
    options.add_argument("--batch-size", type=int, help="default 64; 32 when quick")
    options.add_argument("--peer-python", default=sys.executable, help="interpreter with the peer installed")
    chosen = options.parse_args()
    chosen.batch_size = chosen.batch_size or (32 if chosen.quick else 64)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder, chosen.quick)
        sides = Side(sys.executable, "ours"), Side(chosen.peer_python, "peer")
        rows = loader_rows(folder, chosen, *sides)
        for side in sides:
            side.close()
        many = make_many(folder, chosen.quick)
        resume_seconds(many, 0.5)  # makes the index, which is not what is compared
        late, early = in_turns(
            lambda: resume_seconds(many, 0.9), lambda: resume_seconds(many, 0.1), repeats=chosen.repeats
        )
        rows.append(compared("resume_90_over_10", "s", late, early, reach=1.5))
        rows.append(pixel_difference(folder))
    show(
        "loader",
        rows,
        repeats=chosen.repeats,
        packages=("torch", "open_clip_torch", "webdataset", "pillow", "simplejpeg"),
        as_json=chosen.json,
        batch_size=chosen.batch_size,
    )


if __name__ == "__main__":
    main()
