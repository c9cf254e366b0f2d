"""Zero-shot classification on two processes against open_clip's one-rank way, on the same two cores.

    python scripts/bench/evaluation.py                 # the sizes of the table
    python scripts/bench/evaluation.py --quick --json

Ours: two processes of one thread each, with classes and pictures divided over them. The peer, as in
`open_clip_train` when two processes train: rank 0 alone makes the class vectors, with
`open_clip.build_zero_shot_classifier`, and classifies, with `open_clip_train.zero_shot.run`, in two threads.
Same weights, tokenizer and pictures, which lie in memory; the peer's are normalised beforehand. Wall time on
rank 0 from the call to the figures, in turns. Both must come to the same accuracy.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import compared, in_ranks, in_turns, parser, show
from torch import Tensor

from shardclip.models import factory
from shardclip.models.factory import ModelSpec
from shardclip.training.data.image_input import ImageInput, normalise
from shardclip.training.distributed import Processes, current
from shardclip.training.evaluation.names import imagenet
from shardclip.training.evaluation.zero_shot import classifier, zero_shot

RANKS = 2
SPEC = ModelSpec(
    name="tiny",
    model_cfg={
        "embed_dim": 64,
        "custom_text": True,
        "vision_cfg": {"image_size": 32, "layers": 4, "width": 64, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 4},
    },
    preprocess_cfg={"size": 32},
)
IMAGE_INPUT = ImageInput.from_preprocess_cfg(SPEC.preprocess_cfg)


class Job:
    """The same evaluation in two ways."""

    def __init__(self, flags: argparse.Namespace, processes: Processes) -> None:
        import open_clip

        self.processes, self.batch_size = processes, flags.batch_size
        self.tokenize = factory.tokenizer(SPEC)
        words = imagenet()
        self.classnames, self.templates = (
            words.classnames[: flags.classes],
            words.templates[: flags.templates],
        )
        self.ours = factory.build(SPEC, seed=0)
        model_cfg = {name: value for name, value in SPEC.model_cfg.items() if name != "custom_text"}
        self.peer = open_clip.CustomTextCLIP(**model_cfg).eval()
        self.peer.load_state_dict(self.ours.state_dict())
        generator = torch.Generator().manual_seed(0)
        self.pictures = torch.randint(
            0, 256, (flags.pictures, 3, 32, 32), dtype=torch.uint8, generator=generator
        )
        self.labels = torch.randint(0, flags.classes, (flags.pictures,), generator=generator)
        self.normalised = normalise(self.pictures, IMAGE_INPUT)
        self.top1: dict[str, float] = {}

    def _batches(self, pictures: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(pictures.split(self.batch_size), labels.split(self.batch_size), strict=True))

    def run_ours(self) -> None:
        """Both ranks, one thread each."""
        torch.set_num_threads(1)
        weights = classifier(
            self.ours, self.tokenize, self.classnames, self.templates, processes=self.processes
        )
        own = slice(
            len(self.labels) * self.processes.rank // RANKS,
            len(self.labels) * (self.processes.rank + 1) // RANKS,
        )
        figures = zero_shot(
            self.ours,
            weights,
            self._batches(self.pictures[own], self.labels[own]),
            normalise=lambda pictures: normalise(pictures, IMAGE_INPUT),
            processes=self.processes,
        )
        self.top1["ours"] = figures["acc1"]

    def run_peer(self) -> None:
        """Rank 0 with all threads, the other rank waits."""
        if not self.processes.is_primary:
            return
        import open_clip
        from open_clip_train import zero_shot as theirs

        torch.set_num_threads(RANKS)
        templates = open_clip.OPENAI_IMAGENET_TEMPLATES[: len(self.templates)]
        args = argparse.Namespace(device="cpu", precision="fp32", batch_size=self.batch_size)
        with contextlib.redirect_stderr(io.StringIO()), torch.inference_mode():
            weights = open_clip.build_zero_shot_classifier(
                self.peer, self.tokenize, self.classnames, templates
            )
            top1, _ = theirs.run(self.peer, weights, self._batches(self.normalised, self.labels), args)
        self.top1["peer"] = top1

    def seconds(self, which: str) -> float:
        """Wall time of one way, from a common start to the figures."""
        self.processes.barrier()
        start = time.perf_counter()
        getattr(self, f"run_{which}")()
        return time.perf_counter() - start


def _mend_accuracy() -> None:
    """open_clip 3.3.0's `accuracy` makes a float of an array of one element, which NumPy 2.4 refuses."""
    from open_clip_train import zero_shot as theirs

    def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
        hits = output.topk(max(topk), 1, True, True)[1].t().eq(target)
        return [float(hits[:k].sum()) for k in topk]

    theirs.accuracy = accuracy


def work(rank: int, rendezvous: str, flags: argparse.Namespace) -> None:
    """One of the two processes: all turns, and on rank 0 the report."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    job = Job(flags, current())
    _mend_accuracy()
    for which in ("ours", "peer"):
        job.seconds(which)
    ours, peer = in_turns(lambda: job.seconds("ours"), lambda: job.seconds("peer"), repeats=flags.repeats)
    if rank == 0:
        if abs(job.top1["ours"] - job.top1["peer"]) > 1.5 / flags.pictures:
            raise RuntimeError(f"the two ways do not agree: top-1 {job.top1}")
        row = compared("wall_ratio", "s", ours, peer, reach=0.6)
        sizes: dict[str, Any] = {
            name: getattr(flags, name) for name in ("classes", "templates", "pictures", "batch_size")
        }
        show(
            "evaluation",
            [row],
            repeats=flags.repeats,
            packages=("torch", "open_clip_torch"),
            as_json=flags.json,
            sizes=sizes,
        )
    job.processes.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--classes", type=int, default=1000)
    options.add_argument("--templates", type=int, default=8)
    options.add_argument("--pictures", type=int, default=2000)
    options.add_argument("--batch-size", type=int, default=64, help="pictures per forward, for both")
    flags = options.parse_args()
    if flags.quick:
        flags.classes, flags.pictures = 100, 200
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(work, RANKS, str(Path(folder, "rendezvous")), flags)


if __name__ == "__main__":
    main()
