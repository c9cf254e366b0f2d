"""Training on one GPU in bf16, ours against open_clip's training loop: samples/s, MFU, peak memory.

    python scripts/bench/gpu.py [--json] [--quick] [--models ViT-B-32 ViT-L-14] [--batch-size 256]

Both train the same architecture on the same batches, which lie in (pinned) memory as each side's loader
hands them over: ours uint8, the peer's normalised fp32. Captions have 18 tokens in the mean, log-normal.
Each side is tried with and without torch.compile and recompute, in processes of its own, and compared at its
fastest, in turns. The peer is `open_clip_train.train.train_one_epoch` on what `open_clip.create_model`
makes. MFU is three forward passes of the tokens that are computed over the device's peak; what is computed
again is no work. `MODEL_loader` is ours with the loader in front (512x384 JPEG, four workers) over ours from
memory.

Without a GPU every row is null with the reason; `--device cpu` does the same on a CPU, slowly.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Row, compared, in_child, in_turns, parser, show
from shards import caption, caption_words, photograph, write_shard

from shardclip.training import config as configuration
from shardclip.training import distributed
from shardclip.training.data.batch import Batch
from shardclip.training.data.image_input import ImageInput, normalise
from shardclip.training.start import Run, start_run
from shardclip.training.throughput import peak_flops

MODELS = {"ViT-B-32": 0.30, "ViT-B-16": None, "ViT-L-14": 0.45, "ViT-H-14": 0.45}
"""The MFU to reach."""
SHARDS = 8
WARMUP = 5
"""Steps that do not count."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how."""

    model: str
    batch: int
    device: str
    compiled: bool
    recomputed: bool

    @property
    def flags(self) -> list[str]:
        """Those that both trainers know."""
        words = f"--model {self.model} --batch-size {self.batch} --device {self.device} --precision amp_bf16"
        extra = ["--torchcompile"] * self.compiled + ["--grad-checkpointing"] * self.recomputed
        return [*words.split(), "--lr", "5e-4", "--warmup", "0", "--seed", "0", *extra]


@dataclass(frozen=True)
class Found:
    """What a run of some steps showed."""

    rate: float
    """Samples per second."""
    memory: float
    """Peak bytes allocated on the device; 0 on a CPU."""
    mfu: float | None


def captions(number: int, seed: int) -> list[str]:
    """Captions with lengths as they are met."""
    chance = np.random.default_rng(seed)
    return [caption(words, chance) for words in caption_words(number, chance)]


def in_memory(setting: Setting, tokenize: Any, side: int) -> list[Batch]:
    """Batches of noise with real captions."""
    rows = torch.arange(setting.batch)
    made = []
    for seed in range(2):
        images = torch.randint(
            0,
            256,
            (setting.batch, 3, side, side),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
        texts = tokenize(captions(setting.batch, seed))
        made.append(Batch(images, texts, rows, rows, rows, ["noise"] * setting.batch))
    return [batch.pin_memory() for batch in made] if setting.device == "cuda" else made


def timed(steps: Iterator[Any], warmup: int, number: int, device: str) -> float:
    """Seconds of a step, the mean of `number` after `warmup`."""
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in islice(steps, warmup):
        pass
    finish()
    began = time.perf_counter()
    for _ in islice(steps, number):
        pass
    finish()
    return (time.perf_counter() - began) / number


def ours(setting: Setting, steps: int, shards: str | None = None) -> Found:
    """Steps of `shardclip train`, on batches in memory or from shards."""
    data = ["--dataset-type", "synthetic", "--workers", "0"]
    if shards is not None:
        data = ["--train-data", shards, "--workers", "4"]
    with tempfile.TemporaryDirectory() as folder:
        number = str(setting.batch * 10 * steps)
        words = [
            *setting.flags,
            *data,
            "--train-num-samples",
            number,
            "--output-dir",
            folder,
            "--name",
            "run",
        ]
        config = configuration.parse(words)
        with distributed.start(config.distributed) as processes:
            run = start_run(config, Path(folder), processes)
            batches: Iterable[Batch] = run.loader
            if shards is None:
                batches = cycle(in_memory(setting, run.tokenize, run.image_input.size[0]))
            tokens: list[int] = []
            seconds = timed(_steps(run, batches, tokens), WARMUP, steps, setting.device)
            run.loader.close()
            return Found(setting.batch / seconds, _peak(setting), _mfu(run, setting, tokens, seconds))


def _steps(run: Run, batches: Iterable[Batch], tokens: list[int]) -> Iterator[None]:
    for batch in batches:
        totals = run.step.agree(batch)
        run.step(batch, totals)
        tokens.append(totals.text_tokens)
        yield


def _mfu(run: Run, setting: Setting, tokens: list[int], seconds: float) -> float | None:
    peak = peak_flops(run.processes.device, torch.bfloat16)
    if peak is None or run.flops is None:
        return None
    forward = run.flops.of(sum(tokens) / len(tokens) / setting.batch)
    return 3 * forward * setting.batch / seconds / peak


def _peak(setting: Setting) -> float:
    return float(torch.cuda.max_memory_allocated()) if setting.device == "cuda" else 0.0


class Repeated:
    """What open_clip's loop reads: the same batches again and again, for so many steps."""

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]], steps: int) -> None:
        self.batches, self.num_batches = batches, steps
        self.num_samples = steps * len(batches[0][0])
        self.dataloader = self

    def set_epoch(self, epoch: int) -> None:
        """Nothing is shuffled."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return islice(cycle(self.batches), self.num_batches)


def peer(setting: Setting, steps: int) -> Found:
    """Steps of open_clip's trainer."""
    import open_clip
    from open_clip_train.params import parse_args
    from open_clip_train.train import train_one_epoch

    arguments: Namespace = parse_args([*setting.flags, "--skip-scheduler", "--log-every-n-steps", "1000000"])
    arguments.__dict__.update(
        rank=0, local_rank=0, world_size=1, distributed=False, horovod=False, distill=False, wandb=False
    )
    model = open_clip.create_model(
        setting.model, precision=arguments.precision, device=setting.device, output_dict=True
    )
    model.set_grad_checkpointing(setting.recomputed)
    image_input = ImageInput()
    ready = [
        (normalise(batch.images, image_input), batch.texts)
        for batch in in_memory(setting, open_clip.get_tokenizer(setting.model), image_input.size[0])
    ]
    if setting.device == "cuda":
        ready = [(images.pin_memory(), texts.pin_memory()) for images, texts in ready]
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, fused=setting.device == "cuda")
    trained = torch.compile(model) if setting.compiled else model
    loss = open_clip.create_loss(arguments)

    def epoch(number: int) -> None:
        data = {"train": Repeated(ready, number)}
        train_one_epoch(trained, data, loss, 0, optimizer, None, None, None, arguments)

    epoch(WARMUP)
    seconds = timed(iter(lambda: epoch(steps), 0), 0, 1, setting.device) / steps
    return Found(setting.batch / seconds, _peak(setting), None)


def fastest(run: Any, model: str, chosen: argparse.Namespace) -> Setting:
    """The setting in which `run` is fastest; one that does not fit in memory, or fails, is none.

    Raises:
        RuntimeError: none works.
    """
    tried: dict[Setting, float] = {}
    for compiled, recomputed in product((False, True), repeat=2):
        setting = Setting(model, chosen.batch_size, chosen.device, compiled, recomputed)
        try:
            tried[setting] = in_child(run, setting, 3).rate
        except Exception as error:
            print(f"{run.__name__}, {setting}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
    if not tried:
        raise RuntimeError(f"{run.__name__} ran in no setting")
    return max(tried, key=tried.__getitem__)


def names(model: str) -> dict[str, tuple[str, Any, float | None]]:
    """The rows of a model: unit, which is better, what to reach."""
    return {
        f"{model}_samples": ("samples/s", "higher", 1.2),
        f"{model}_mfu": ("of peak", "higher", MODELS.get(model)),
        f"{model}_memory": ("GB", "lower", None),
        f"{model}_loader": ("samples/s", "higher", None),
    }


def rows_of(model: str, shards: str, chosen: argparse.Namespace) -> tuple[list[Row], list[Setting]]:
    """The rows of a model, and the settings of ours and of the peer that they are about."""
    settings = [fastest(run, model, chosen) for run in (ours, peer)]
    found = in_turns(
        partial(in_child, ours, settings[0], chosen.steps),
        partial(in_child, peer, settings[1], chosen.steps),
        repeats=chosen.repeats,
    )
    fed = [in_child(ours, settings[0], chosen.steps, shards).rate for _ in range(chosen.repeats)]
    mfu = [one.mfu for one in found[0] if one.mfu is not None]
    samples, used, memory, loader = names(model).items()
    rates = [[one.rate for one in side] for side in found]
    rows = [compared(samples[0], samples[1][0], *rates, better="higher", reach=samples[1][2])]
    if mfu:
        rows.append(compared(used[0], used[1][0], mfu, [1.0] * len(mfu), better="higher", reach=used[1][2]))
    else:
        rows.append(Row(used[0], *used[1], reason="the device's peak is not known"))
    if chosen.device == "cuda":
        rows.append(
            compared(memory[0], memory[1][0], *([one.memory / 1e9 for one in side] for side in found))
        )
    else:
        rows.append(Row(memory[0], *memory[1], reason="counted on a GPU only"))
    rows.append(compared(loader[0], loader[1][0], fed, rates[0], better="higher"))
    return rows, settings


def write_shards(folder: Path, quick: bool) -> str:
    """Shards of JPEGs with captions, in the form of --train-data."""
    chance = np.random.default_rng(0)
    pictures = [photograph((384, 512), chance) for _ in range(8 if quick else 64)]
    for shard in range(SHARDS):
        write_shard(folder / f"{shard:05d}.tar", pictures, captions(32 if quick else 256, shard))
    return f"{folder}/{{00000..{SHARDS - 1:05d}}}.tar"


def main() -> None:
    """Measure and print."""
    options = parser(__doc__, repeats=3)
    options.add_argument("--models", nargs="+", default=list(MODELS))
    options.add_argument("--batch-size", type=int, help="of the GPU; default 256")
    options.add_argument("--steps", type=int, help="steps of a measurement; default 30")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    chosen = options.parse_args()
    chosen.batch_size = chosen.batch_size or (8 if chosen.device == "cpu" else 256)
    chosen.steps = chosen.steps or (2 if chosen.quick else 30)
    rows: list[Row] = []
    settings: dict[str, list[dict[str, Any]]] = {}
    if chosen.device == "cuda" and not torch.cuda.is_available():
        rows = [
            Row(name, *how, reason="there is no GPU")
            for model in chosen.models
            for name, how in names(model).items()
        ]
    else:
        with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
            shards = write_shards(Path(name), chosen.quick)
            for model in chosen.models:
                found, used = rows_of(model, shards, chosen)
                rows += found
                settings[model] = [asdict(setting) for setting in used]
    show(
        "gpu",
        rows,
        repeats=chosen.repeats,
        packages=("torch", "open_clip_torch", "shardclip"),
        as_json=chosen.json,
        settings=settings,
    )


if __name__ == "__main__":
    sys.exit(main())
