"""What the ranks tell each other before a step, on the CPU: what each holds, and what it wishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardclip.models.losses.gather import RankCounts
from shardclip.training.distributed import Processes


@dataclass(frozen=True)
class Totals:
    """What the whole batch holds, over ranks and micro-batches: the same on every rank."""

    ranks: RankCounts
    """The samples and sides that each rank holds."""
    target_tokens: int
    text_tokens: int
    """Token ids that the text tower has to compute: without padding where it is packed."""
    ready: bool
    """Whether every rank has a batch."""
    stop: bool
    """Whether any rank was asked to stop."""
    save: bool
    """Whether any rank wants a checkpoint after this step."""

    @property
    def samples(self) -> int:
        """Samples of all ranks."""
        return sum(self.ranks.samples)

    @property
    def pairs(self) -> int:
        """Samples of all ranks that have both sides."""
        return sum(self.ranks.pairs)


def told(held: Sequence[int], processes: Processes, *, ready: bool, save: bool) -> Totals:
    """The totals over all ranks, in one small collective; every rank calls it.

    Args:
        held: this rank's images, texts, samples, pairs, target tokens and text tokens.
        processes: the ranks.
        ready: whether this rank has a batch.
        save: whether it wants a checkpoint after the step.
    """
    own = torch.tensor([*held, int(ready), processes.stop.flag(), int(save)])
    rows = own
    if processes.is_distributed:
        rows = own.new_empty(processes.world_size * len(own))
        dist.all_gather_single(rows, own)
    columns = rows.view(-1, len(own)).T.tolist()
    counts, (targets, tokens, is_ready, stop, wish) = columns[:4], columns[4:]
    return Totals(
        RankCounts(*map(tuple, counts)), sum(targets), sum(tokens), all(is_ready), any(stop), any(wish)
    )
