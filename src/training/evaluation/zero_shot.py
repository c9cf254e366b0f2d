"""Zero-shot classification (Radford et al. 2021, arXiv:2103.00020, section 3.1), divided over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardclip.errors import UserError
from shardclip.models.transfer import sent
from shardclip.training.distributed import Processes
from shardclip.training.evaluation.lockstep import first_known, lockstep
from shardclip.training.evaluation.names import prompts
from shardclip.training.evaluation.scores import count_ahead, similarity
from shardclip.training.evaluation.undisturbed import undisturbed

Tokenize = Callable[[list[str]], Tensor]


def classifier(
    model: nn.Module,
    tokenize: Tokenize,
    classnames: Sequence[str],
    templates: Sequence[str],
    *,
    processes: Processes,
    batch_size: int = 256,
    device: torch.device | None = None,
) -> Tensor:
    """One weight vector per class: the normalised mean of the features of its prompts.

    Classes are divided over the ranks, so each prompt is encoded once in all; a name that occurs twice is
    encoded once and gets equal weights.

    Args:
        model: a `DualEncoder`, plain or wrapped by DDP or FSDP; every rank calls this.
        tokenize: prompts to token ids [T, L].
        classnames: C names.
        templates: prompts with `{}` or `{c}` where the name goes.
        processes: the ranks.
        batch_size: prompts per forward.
        device: where the model is; None means the device of `processes`.

    Returns:
        [D, C] fp32, the same on every rank, columns of length 1.

    Raises:
        UserError: no class, no template, or a template without a place for the name.
    """
    device = device or processes.device
    names = list(dict.fromkeys(classnames))
    texts = prompts(names, templates)
    first = len(names) * processes.rank // processes.world_size
    last = len(names) * (processes.rank + 1) // processes.world_size
    own = texts[first * len(templates) : last * len(templates)]
    batches = (
        (start // len(templates), start % len(templates), own[start : start + batch_size])
        for start in range(0, len(own), batch_size)
    )
    sums = None
    with undisturbed(model, processes) as encoder:
        for batch in lockstep(batches, processes, "zero-shot prompts"):
            offset, phase, part = batch or (0, 0, texts[:1])
            features = encoder(text=encoder.text_input(tokenize(part), device)).text_features
            if sums is None:
                sums = torch.zeros(last - first, features.shape[1], dtype=torch.float64, device=device)
            if batch is not None:
                # fp64, so that where a batch happens to be cut does not show in the sum.
                rows = offset + (phase + torch.arange(len(part), device=device)) // len(templates)
                sums.index_add_(0, rows, features.double())
    assert sums is not None
    weights = F.normalize(sums, dim=1).float().cpu()
    gathered = torch.cat(processes.all_gather_object(weights)).to(device)
    column = {name: index for index, name in enumerate(names)}
    return gathered[[column[name] for name in classnames]].T.contiguous()


def zero_shot(
    model: nn.Module,
    weights: Tensor,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    normalise: Callable[[Tensor], Tensor],
    processes: Processes,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Classify each picture by the class vector that its features are nearest to.

    Args:
        model: a `DualEncoder`, plain or wrapped by DDP or FSDP; every rank calls this.
        weights: [D, C] fp32, what `classifier` returned.
        batches: this rank's pictures [B, 3, H, W] uint8 and labels [B] int64; no sample on two ranks.
        normalise: uint8 pictures, on the device, to what the image tower wants.
        processes: the ranks.
        device: where the model is; None means the device of `processes`.

    Returns:
        `acc1`, `acc5`, `mean_per_class_recall` (over the classes that occur), all in 0 to 1, and `samples`.
        Equal scores rank by class number.

    Raises:
        UserError: a label that is not a class number, or no picture on any rank.
    """
    device = device or processes.device
    class_count = weights.shape[1]
    per_class = weights.T.contiguous()
    # Rows: samples, right at rank 1, right within rank 5; columns: classes.
    counts = torch.zeros(3, class_count, dtype=torch.int64, device=device)
    shape = None
    with undisturbed(model, processes) as encoder:
        for batch in lockstep(_checked(batches, class_count), processes, "zero-shot pictures"):
            if shape is None:
                shape = first_known(None if batch is None else tuple(batch[0].shape[1:]), processes)
            images = torch.zeros(1, *shape, dtype=torch.uint8) if batch is None else batch[0]
            features = encoder(image=normalise(sent(images, device))).image_features
            if batch is not None:
                _tally(counts, similarity(features, per_class), sent(batch[1], device))
    samples, right, right_5 = sum(processes.all_gather_object(counts.cpu())).tolist()
    return _figures(samples, right, right_5)


def _checked(batches: Iterable[tuple[Tensor, Tensor]], class_count: int) -> Iterable[tuple[Tensor, Tensor]]:
    for images, labels in batches:
        if len(labels) == 0:
            continue
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= class_count:
            raise UserError(
                f"zero-shot data: label {low if low < 0 else high} found, but there are {class_count} class "
                f"names (0 to {class_count - 1}); give the data set's own names"
            )
        yield images, labels


def _tally(counts: Tensor, scores: Tensor, labels: Tensor) -> None:
    class_numbers = torch.arange(scores.shape[1], device=scores.device)
    own_score = scores.gather(1, labels[:, None])[:, 0]
    rank = count_ahead(scores, own_score, labels, class_numbers)
    counted = torch.stack([torch.ones_like(rank), rank < 1, rank < 5])
    counts.index_add_(1, labels, counted.to(counts.dtype))


def _figures(samples: list[int], right: list[int], right_5: list[int]) -> dict[str, float]:
    total = sum(samples)
    if total == 0:
        raise UserError("zero-shot data: no picture was read on any rank")
    recalls = [hit / count for hit, count in zip(right, samples, strict=True) if count]
    return {
        "acc1": sum(right) / total,
        "acc5": sum(right_5) / total,
        "mean_per_class_recall": sum(recalls) / len(recalls),
        "samples": total,
    }
