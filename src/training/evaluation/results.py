"""What one evaluation found, in the form that CLIP_benchmark writes and as flat numbers for a log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from PIL.Image import Image

from shardclip.training.evaluation.config import Task

_SCALAR_NAMES = {"acc1": "top1", "acc5": "top5", "mean_per_class_recall": "mean-per-class-recall"}
_SCALAR_PREFIXES = {"imagenet1k": "imagenet"}


@dataclass(frozen=True)
class Result:
    """One data set, one task."""

    dataset: str
    model: str
    """The architecture's name."""
    pretrained: str
    """Where its weights came from."""
    task: Task
    metrics: dict[str, float]
    """Shares in 0 to 1, ranks from 1, the loss."""
    samples: int
    """Pictures or pairs, of all ranks, each counted once."""
    classes: int | None = None
    templates: int | None = None
    names_digest: str | None = None
    """Of class names and templates; equal digests, equal words."""
    language: str = "en"
    picture: Image | None = field(default=None, compare=False)
    """On rank 0: some samples with what the model holds nearest to them."""

    def to_json(self) -> dict[str, Any]:
        """CLIP_benchmark's object; what it does not know stands beside its own fields.

        Retrieval has both its names and open_clip's: its `image_retrieval` is `text_to_image` here.
        """
        metrics = dict(self.metrics)
        if self.task == "zeroshot_retrieval":
            for theirs, ours in (("image_retrieval", "text_to_image"), ("text_retrieval", "image_to_text")):
                metrics |= {f"{theirs}_recall@{k}": self.metrics[f"{ours}_R@{k}"] for k in (1, 5, 10)}
        fields: dict[str, Any] = {
            "dataset": self.dataset,
            "model": self.model,
            "pretrained": self.pretrained,
            "task": self.task,
            "metrics": metrics,
            "language": self.language,
            "samples": self.samples,
        }
        if self.task == "zeroshot_classification":
            fields |= {
                "classes": self.classes,
                "templates": self.templates,
                "names_digest": self.names_digest,
            }
        return fields

    def scalars(self) -> dict[str, float]:
        """Flat numbers under open_clip's names: `imagenet-zeroshot-val-top1`, `image_to_text_R@1`, ..."""
        if self.task == "zeroshot_retrieval":
            return {**self.metrics, "num_samples": self.samples}
        prefix = f"{_SCALAR_PREFIXES.get(self.dataset, self.dataset)}-zeroshot-val"
        return {f"{prefix}-{_SCALAR_NAMES[name]}": value for name, value in self.metrics.items()}


def scalars(results: Iterable[Result]) -> dict[str, float]:
    """The flat numbers of several results, for one line of a log."""
    return {name: value for result in results for name, value in result.scalars().items()}
