"""How costs grow, beside what theory says: the loss by global batch, traffic and wrapping by ranks, resuming.

    python scripts/bench/growth.py [--json] [--quick] [--plot growth.png]

The loss is that of loss.py, one rank of the global batch. Traffic is what `shardclip plan` counts for
ViT-B-32 under --fsdp, 64 samples a rank; theory is weights gathered twice in bf16, gradients reduced once in
fp32, and the features of the global batch gathered once in fp32. Wrapping is the CPU time in which ViT-B-32
is laid over simulated ranks, in nodes of 8. Resuming is from opening the loader to its first batch, in
100,000 samples. Each row is the last point of its curve over what theory says there; theory starts at the
first point where it says only how a cost grows.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import loader
import loss
import torch
from report import Row, compared, in_child, parser, show

from shardclip.models import factory
from shardclip.training import config as configuration
from shardclip.training.config import TrainConfig
from shardclip.training.parallel import lay_out
from shardclip.training.planning.extrapolation import predict
from shardclip.training.planning.simulation import World, simulated

MODEL, LOCAL_BATCH = "ViT-B-32", 64


@dataclass(frozen=True)
class Curve:
    """A cost at growing sizes."""

    name: str
    over: str
    unit: str
    sizes: Sequence[float]
    measured: Sequence[float]
    theory: Sequence[float]
    law: str
    """Theory, in words."""

    def row(self) -> Row:
        """The last point over theory."""
        return compared(f"{self.name}_over_theory", self.unit, [self.measured[-1]], [self.theory[-1]])


def curve(
    name: str,
    over: str,
    unit: str,
    law: str,
    sizes: Sequence[float],
    measure: Callable[[float], float],
    growth: Callable[[float], float],
) -> Curve:
    """The curve of `measure`; theory has its first value and grows like `growth`."""
    measured = [measure(size) for size in sizes]
    theory = [measured[0] * growth(size) / growth(sizes[0]) for size in sizes]
    return Curve(name, over, unit, sizes, measured, theory, law)


def loss_curves(quick: bool) -> list[Curve]:
    """Memory and time of the softmax loss."""
    local = 512 if quick else 2048
    batches = [local * ranks for ranks in ((2, 4, 8) if quick else (4, 8, 16, 32))]

    def sizes(batch: float) -> loss.Sizes:
        return loss.Sizes(local, int(batch) // local, 512, loss.TILE // (4 if quick else 1))

    return [
        curve(
            "loss_memory",
            "global batch",
            "MB",
            "constant",
            batches,
            lambda batch: in_child(loss.peak_bytes, "ours", "softmax", sizes(batch), 1) / 1e6,
            lambda batch: 1.0,
        ),
        curve(
            "loss_time",
            "global batch",
            "CPU s",
            "proportional",
            batches,
            lambda batch: in_child(loss_seconds, sizes(batch)),
            lambda batch: batch,
        ),
    ]


def loss_seconds(sizes: loss.Sizes) -> float:
    """CPU seconds of the second of two steps."""
    torch.set_num_threads(1)
    loss.join(sizes.ranks)
    return [loss.cpu_seconds("ours", "softmax", sizes) for _ in range(2)][-1]


def traffic_curves(ranks: Sequence[int]) -> list[Curve]:
    """Collectives and bytes of a step by ranks."""
    spec = factory.resolve(run_settings().model, sigmoid=False)
    parameters = sum(parameter.numel() for parameter in factory.build_meta(spec).parameters())
    features = 2 * 4 * spec.model_cfg["embed_dim"] * LOCAL_BATCH
    counts, sent = zip(*(in_child(traffic, number) for number in ranks), strict=True)
    in_theory = tuple((8 * parameters + features * number) / 1e9 for number in ranks)
    law = "8 bytes a parameter, and the features"
    return [
        Curve("collectives", "ranks", "a step", ranks, counts, counts[:1] * len(ranks), "constant"),
        Curve("traffic", "ranks", "GB a step", ranks, tuple(number / 1e9 for number in sent), in_theory, law),
    ]


def traffic(ranks: int) -> tuple[float, float]:
    """Collectives of a step and their bytes, of one rank."""
    config, world = run_settings(), World(ranks, 8)
    with simulated(world):
        found = predict(config, factory.resolve(config.model, sigmoid=False), world)
    kinds = found.traffic.values()
    return sum(kind.count for kind in kinds), sum(kind.bytes for kind in kinds)


def run_settings() -> TrainConfig:
    """Those of the run whose growth is looked at."""
    words = (
        f"--model {MODEL} --fsdp --batch-size {LOCAL_BATCH} --dataset-type synthetic --train-num-samples 1"
    )
    return configuration.parse(words.split())


def wrap_seconds(ranks: int) -> float:
    """CPU seconds of laying the model, without memory, over so many ranks."""
    config = run_settings()
    model = factory.build_meta(factory.resolve(config.model, sigmoid=False))
    world = World(ranks, 8)
    with simulated(world):
        began = time.process_time()
        lay_out(model, config.parallel, world.processes())
        return time.process_time() - began


def resume_curve(folder: Path, quick: bool) -> Curve:
    """Resuming by the position in the epoch."""
    data = loader.make_many(folder, quick)
    loader.resume_seconds(data, 0.5)  # makes the index, which is not what is compared
    return curve(
        "resume",
        "share of the epoch",
        "s",
        "constant",
        (0.1, 0.5, 0.9),
        lambda share: loader.resume_seconds(data, share),
        lambda share: 1.0,
    )


def draw(curves: Sequence[Curve], path: Path) -> None:
    """A small plot for each curve, measured and in theory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves) / 2, 6), layout="constrained")
    for axes, each in zip(figure.subplots(2, -(-len(curves) // 2)).flat, curves, strict=False):
        axes.plot(each.sizes, each.measured, "o-", label="measured")
        axes.plot(each.sizes, each.theory, "--", color="grey", label=each.law)
        axes.set(title=each.name.replace("_", " "), xlabel=each.over, ylabel=each.unit, ylim=(0, None))
        if each.over != "share of the epoch":
            axes.set_xscale("log", base=2)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Measure, print and draw."""
    options = parser(__doc__, repeats=1)
    options.add_argument("--plot", type=Path, help="draw the curves into this file")
    chosen = options.parse_args()
    ranks = (8, 64) if chosen.quick else (8, 64, 256, 1024)
    with tempfile.TemporaryDirectory(prefix="bench-growth-") as name:
        curves = [
            *loss_curves(chosen.quick),
            *traffic_curves(ranks),
            curve(
                "wrapping",
                "ranks",
                "CPU s",
                "constant",
                ranks,
                lambda n: in_child(wrap_seconds, int(n)),
                lambda n: 1.0,
            ),
            resume_curve(Path(name), chosen.quick),
        ]
    if chosen.plot:
        draw(curves, chosen.plot)
    show(
        "growth",
        [each.row() for each in curves],
        repeats=chosen.repeats,
        packages=("torch", "shardclip"),
        as_json=chosen.json,
        curves=[asdict(each) for each in curves],
    )


if __name__ == "__main__":
    sys.exit(main())
