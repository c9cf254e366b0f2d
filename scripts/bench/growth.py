"""How costs grow, beside what theory says: the loss by global batch, traffic and wrapping by ranks, resuming.

    python scripts/bench/growth.py [--json] [--quick] [--plot growth.png]

The loss is that of loss.py, one rank of the global batch. Ranks are simulated: ViT-B-32 under --fsdp, 64
samples a rank, nodes of 8, so that weights are sharded within a node. Theory of the traffic is what
`shardclip plan` should count: weights gathered twice in bf16, gradients reduced in fp32 within a node and the
shards of them across nodes, the features of the global batch gathered once in fp32. Wrapping is the CPU time
of laying the model over the ranks. Resuming is from opening the loader to its first batch, 100,000 samples.
Each row is the last point of its curve over what theory says there; theory starts at the first point where
it says only how a cost grows.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
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

MODEL, LOCAL_BATCH, NODE = "ViT-B-32", 64, 8


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


def like_the_first(
    name: str, over: str, unit: str, sizes: Sequence[float], measured: Sequence[float]
) -> Curve:
    """A curve that theory says is flat."""
    return Curve(name, over, unit, sizes, measured, [measured[0]] * len(sizes), "constant")


def loss_curves(quick: bool) -> list[Curve]:
    """Memory and time of the softmax loss."""
    local = 512 if quick else 2048
    ranks = (2, 8) if quick else (4, 8, 16, 32)
    sizes = [loss.Sizes(local, number, 512, loss.TILE // (4 if quick else 1)) for number in ranks]
    batches = [local * number for number in ranks]
    memory = [in_child(loss.peak_bytes, "ours", "softmax", size, 1) / 1e6 for size in sizes]
    seconds = [in_child(loss_seconds, size) for size in sizes]
    in_theory = [seconds[0] * batch / batches[0] for batch in batches]
    return [
        like_the_first("loss_memory", "global batch", "MB", batches, memory),
        Curve("loss_time", "global batch", "CPU s", batches, seconds, in_theory, "proportional"),
    ]


def loss_seconds(sizes: loss.Sizes) -> float:
    """CPU seconds of the second of two steps."""
    torch.set_num_threads(1)
    loss.join(sizes.ranks)
    return [loss.cpu_seconds("ours", "softmax", sizes) for _ in range(2)][-1]


def rank_curves(quick: bool) -> list[Curve]:
    """Collectives and bytes of a step, and the time of wrapping, by ranks."""
    ranks = (16, 64) if quick else (16, 64, 256, 1024)
    counts, sent, wrapping = zip(*(in_child(simulate, number) for number in ranks), strict=True)
    spec = factory.resolve(run_settings().model, sigmoid=False)
    parameters = sum(parameter.numel() for parameter in factory.build_meta(spec).parameters())
    features = 2 * 4 * spec.model_cfg["embed_dim"] * LOCAL_BATCH
    in_theory = [((8 + 4 / NODE) * parameters + features * number) / 1e9 for number in ranks]
    law = "8.5 bytes a parameter, and the features"
    return [
        like_the_first("collectives", "ranks", "a step", ranks, counts),
        Curve("traffic", "ranks", "GB a step", ranks, [number / 1e9 for number in sent], in_theory, law),
        like_the_first("wrapping", "ranks", "CPU s", ranks, wrapping),
    ]


def simulate(ranks: int) -> tuple[float, float, float]:
    """Collectives of a step of one rank, their bytes, and CPU seconds of laying the model over the ranks."""
    config, world = run_settings(), World(ranks, NODE)
    spec = factory.resolve(config.model, sigmoid=False)
    with simulated(world):
        found = predict(config, spec, world)  # and what is done once a process
        model = factory.build_meta(spec)
        began = time.process_time()
        lay_out(model, config.parallel, world.processes())
        seconds = time.process_time() - began
    kinds = found.traffic.values()
    return sum(kind.count for kind in kinds), sum(kind.bytes for kind in kinds), seconds


def run_settings() -> TrainConfig:
    """Those of the run whose growth is looked at."""
    words = (
        f"--model {MODEL} --fsdp --batch-size {LOCAL_BATCH} --dataset-type synthetic --train-num-samples 1"
    )
    return configuration.parse(words.split())


def resume_curve(folder: Path, quick: bool) -> Curve:
    """Resuming by the position in the epoch."""
    data = loader.make_many(folder, quick)
    loader.resume_seconds(data, 0.5)  # makes the index, which is not what is compared
    shares = (0.1, 0.5, 0.9)
    seconds = [loader.resume_seconds(data, share) for share in shares]
    return like_the_first("resume", "share of the epoch", "s", shares, seconds)


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
    with tempfile.TemporaryDirectory(prefix="bench-growth-") as name:
        curves = [
            *loss_curves(chosen.quick),
            *rank_curves(chosen.quick),
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
