"""What is evaluated, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardclip.errors import UserError

Task = Literal["zeroshot_classification", "zeroshot_retrieval"]
"""By the names that CLIP_benchmark has for them."""
TASKS: frozenset[Task] = frozenset(("zeroshot_classification", "zeroshot_retrieval"))


@dataclass(frozen=True)
class EvaluationConfig:
    """Zero-shot classification, and retrieval and loss on the pairs of --val-data."""

    imagenet_val: str | None = None
    """ImageNet's validation pictures: a folder of one folder a class, or tar shards with .cls members. Names
    and templates are open_clip's."""
    imagenet_v2: str | None = None
    """ImageNet-v2's pictures, likewise."""
    zeroshot_data: str | None = None
    """Any labelled pictures: a folder of one folder a class, tar shards with .cls members (CLIP_benchmark's
    layout, with its names and templates beside them), or a table with a column of labels."""
    zeroshot_classnames: str | None = None
    """File with the class names of --zeroshot-data, one a line in the order of the labels; default: the
    classnames.txt beside the data, or the names of its folders."""
    zeroshot_templates: str | None = None
    """File with the prompts of --zeroshot-data, one a line, {c} or {} where the name goes; default: the
    zeroshot_classification_templates.txt beside the data, or `a photo of a {c}.`"""
    zeroshot_frequency: int = 2
    """Classify every so many epochs and at the end; 0: never."""
    val_frequency: int = 1
    """Evaluate the pairs of --val-data every so many epochs and at the end; 0: never."""
    eval_every: int | None = None
    """Do both every so many samples, besides."""
    val_batch_size: int = 64
    """Samples per rank and forward in evaluation. No figure depends on it."""
    val_retrieval_chunk_size: int = 4096
    """Candidates that are scored at a time. No figure depends on it."""
    val_examples: int = 8
    """Pictures, and as many captions, of --val-data that are drawn with their nearest neighbours at each
    evaluation (RUN/pictures); 0: none."""

    def __post_init__(self) -> None:
        for name in ("val_batch_size", "val_retrieval_chunk_size", "eval_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}: 1 or more are meant.")
        for name in ("zeroshot_frequency", "val_frequency", "val_examples"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}: 0 or more are meant.")

    def due(self, before: int, after: int, *, samples_per_epoch: int, last: bool = False) -> frozenset[Task]:
        """What a step that took the samples seen from `before` to `after` makes due.

        Args:
            before: samples seen before the step.
            after: samples seen after it.
            samples_per_epoch: samples of one epoch.
            last: whether it is the last step of the run.
        """

        def crossed(interval: int | None) -> bool:
            return interval is not None and interval > 0 and after // interval > before // interval

        frequencies: dict[Task, int] = {
            "zeroshot_classification": self.zeroshot_frequency,
            "zeroshot_retrieval": self.val_frequency,
        }
        return frozenset(
            task
            for task, epochs in frequencies.items()
            if crossed(self.eval_every) or crossed(epochs * samples_per_epoch) or (last and epochs > 0)
        )
