"""Where the time goes: of a training step, of a sample in the loader, of decoding a picture.

    python scripts/bench/where.py [--json] [--quick] [--repeats N]

The step is that of `shardclip train` on one process with one thread, on batches that lie ready (the model of
`model_limited` in train.py), under torch's profiler: the time of its operators without that of those they
call. `step_python` is what is left of the step. The loader is read by the process itself, with pictures of
512x384; decoding, resizing and tokenising are timed apart on the same samples, `sample_rest` is what is left.
A picture of 1024x768 is decoded at half its size: `picture_codes` is what decoding at an eighth takes, hardly
more than its Huffman codes, which every scale has to read. Every row is a part over its whole: the ratio is
its share.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Row, compared, in_child, parser, show
from shards import photograph
from train import Case, cases, common_flags, data_of, make_data

from shardclip.models import factory
from shardclip.models.factory import ModelSpec
from shardclip.training import config as configuration
from shardclip.training import distributed
from shardclip.training.config import TrainConfig
from shardclip.training.data.decode import JpegFile, Pixels, training_decoder
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.loader import train_loader
from shardclip.training.data.pictures import Pictures
from shardclip.training.data.workers import keep_freed_memory
from shardclip.training.start import start_run

KINDS = {
    "matrix_products": ("addmm", "mm", "bmm", "baddbmm"),
    "attention": ("_scaled_dot_product", "_flash_attention", "_efficient_attention"),
    "convolution": ("mkldnn_convolution", "convolution_backward", "_slow_conv", "thnn_conv"),
    "norms": ("native_layer_norm", "native_batch_norm", "_fused_rms_norm"),
    "activation": ("gelu", "silu"),
    "embedding": ("embedding", "index", "_index_put", "gather", "scatter"),
    "optimizer": ("_fused_adamw", "_foreach", "linalg_vector_norm"),
    "copies": ("copy_", "cat", "clone", "contiguous", "zero_", "fill_"),
}
"""Beginnings of the names of operators; what is none of these is `other_operators`."""


def kind_of(operator: str) -> str:
    """The kind that an operator's time is counted under."""
    name = operator.removeprefix("aten::")
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), "other_operators")


def settings(folder: Path, case: Case) -> TrainConfig:
    """Those of the run that train.py starts."""
    runs = ["--output-dir", str(folder / "runs"), "--name", case.name]
    return configuration.parse([*common_flags(folder, case), *runs])


def step_parts(folder: Path, case: Case) -> dict[str, float]:
    """Seconds of a step by kind of operator, and of the `whole`."""
    torch.set_num_threads(1)
    config = settings(folder, case)
    with distributed.start(config.distributed) as processes:
        run = start_run(config, folder, processes)
        ready = list(islice(run.loader, case.warmup + case.steps))
        for batch in ready[: case.warmup]:
            run.step(batch)
        began = time.perf_counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for batch in ready[case.warmup :]:
                run.step(batch)
            whole = time.perf_counter() - began
    parts: Counter[str] = Counter()
    for event in profile.key_averages():
        parts[kind_of(event.key)] += event.self_cpu_time_total * 1e-6
    parts["python"] = max(whole - parts.total(), 0.0)
    return {name: seconds / case.steps for name, seconds in {**parts, "whole": whole}.items()}


def sample_parts(folder: Path, case: Case) -> dict[str, float]:
    """CPU seconds of a sample in the loader: decoding, resizing, tokenising, the rest, and the `whole`."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    config = settings(folder, case)
    spec = ModelSpec(case.name, case.model_cfg, {"size": 224})
    image_input, tokenize = ImageInput.from_preprocess_cfg(spec.preprocess_cfg), factory.tokenizer(spec)
    decoder = training_decoder(
        image_input, config.data.augmentation(), config.data.decode == "exact", config.data.max_image_pixels
    )
    with tarfile.open(folder / "00000.tar") as tar:
        contents = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    pictures = [content for name, content in contents.items() if name.endswith(".jpg")]
    captions = [content.decode() for name, content in contents.items() if name.endswith(".txt")]
    loader = train_loader(
        configuration.parse(["--train-data", data_of(folder), "--workers", "0"]).data,
        image_input,
        tokenize,
        batch_size=case.batch,
        rank=0,
        world_size=1,
        seed=0,
    )
    batches = iter(loader)
    next(batches)
    marks = [time.process_time()]
    for _ in islice(batches, case.steps):
        pass
    marks.append(time.process_time())
    for start in range(0, len(captions), case.batch):
        tokenize(captions[start : start + case.batch])
    marks.append(time.process_time())
    whole = (marks[1] - marks[0]) / (case.batch * case.steps)
    tokenising = (marks[2] - marks[1]) / len(captions)
    decoding, resizing = decoded_and_resized(pictures, lambda picture: decoder(picture, 0))
    rest = max(whole - decoding - resizing - tokenising, 0.0)
    return {"decode": decoding, "resize": resizing, "tokenise": tokenising, "rest": rest, "whole": whole}


def picture_parts(case: Case) -> dict[str, float]:
    """CPU seconds of decoding a picture of 1024x768: its codes, its pixels, resizing, and the `whole`."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a worker does
    chance = np.random.default_rng(0)
    pictures = [photograph((768, 1024), chance) for _ in range(8)] * case.steps
    files = [file for picture in pictures if (file := JpegFile.read(picture, 10**9)) is not None]
    codes, _ = decoded_and_resized(files, lambda file: file.pixels(8))
    decoding, resizing = decoded_and_resized(files, lambda file: file.pixels(2))
    whole = decoding + resizing
    return {"codes": codes, "pixels": max(decoding - codes, 0.0), "resize": resizing, "whole": whole}


def decoded_and_resized(contents: list[Any], decode: Callable[[Any], Pixels]) -> tuple[float, float]:
    """CPU seconds of decoding a picture, and of resizing one, 64 at a time as the loader does it."""
    decoding = resizing = 0.0
    for start in range(0, len(contents), 64):
        began = time.process_time()
        decoded = [decode(content) for content in contents[start : start + 64]]
        between = time.process_time()
        pictures = Pictures((224, 224))
        for pixels in decoded:
            pictures.add(pixels)
        pictures.stacked()
        decoding += between - began
        resizing += time.process_time() - between
    return decoding / len(contents), resizing / len(contents)


def shares(prefix: str, measured: list[dict[str, float]], unit: str) -> list[Row]:
    """A row for each part, the largest first."""
    whole = [found["whole"] for found in measured]
    names = {name for found in measured for name in found} - {"whole"}
    rows = [
        compared(f"{prefix}_{name}", unit, [found.get(name, 0.0) for found in measured], whole)
        for name in names
    ]
    return sorted(rows, key=lambda row: -(row.ratio or 0.0))


def main() -> None:
    """Measure and print."""
    chosen = parser(__doc__, repeats=3).parse_args()
    decode_limited, model_limited = cases(chosen.quick)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-where-") as name:
        folder = Path(name)
        make_data(folder, chosen.quick)
        for prefix, measure in (
            ("step", partial(step_parts, folder, model_limited)),
            ("sample", partial(sample_parts, folder, decode_limited)),
            ("picture", partial(picture_parts, decode_limited)),
        ):
            measured = [in_child(measure) for _ in range(chosen.repeats)]
            rows += shares(prefix, measured, "s")
    show(
        "where",
        rows,
        repeats=chosen.repeats,
        packages=("torch", "shardclip"),
        as_json=chosen.json,
    )


if __name__ == "__main__":
    sys.exit(main())
