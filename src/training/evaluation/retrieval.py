"""Image-text retrieval and the validation loss: exact, in tiles, over the samples of all ranks.

Each rank keeps the features of its own samples and ranks its own queries; the candidates of every rank pass
by in chunks. Memory is one tile of scores, never a matrix of all pairs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardclip.errors import UserError
from shardclip.training.distributed import Processes
from shardclip.training.evaluation.progress import Progress
from shardclip.training.evaluation.scores import count_ahead, similarity

_TILE_SCORES = {"cpu": 2**20, "cuda": 2**24}
"""Scores per tile: what the caches of a core hold, and what keeps a GPU busy."""
_POSITIONS = 2**20
"""More than a sample has captions or pictures."""


@dataclass
class Side:
    """The images or the texts of one rank, ascending by sample."""

    features: Tensor
    """[n, D] fp32, L2-normalised."""
    sample: Tensor
    """[n] int64: the number of the sample that each row belongs to, among the samples of all ranks."""

    def __post_init__(self) -> None:
        if len(self.sample) > 1 and bool((self.sample.diff() < 0).any()):
            raise ValueError("the rows of a side must be ascending by sample")

    def rows(self, start: int, stop: int) -> Side:
        """The rows from `start` up to `stop`."""
        return Side(self.features[start:stop], self.sample[start:stop])

    @property
    def is_first(self) -> Tensor:
        """[n] bool: the row is the first of its sample."""
        first = torch.ones_like(self.sample, dtype=torch.bool)
        first[1:] = self.sample.diff() > 0
        return first

    @property
    def order(self) -> Tensor:
        """[n] int64: the place in the order by sample, then by position in the sample (ties go by it)."""
        rows = torch.arange(len(self.sample), device=self.sample.device)
        start_of_sample = torch.where(self.is_first, rows, torch.zeros_like(rows)).cummax(dim=0).values
        return self.sample * _POSITIONS + rows - start_of_sample


def retrieval(
    images: Side,
    texts: Side,
    logit_scale: float,
    *,
    processes: Processes,
    chunk_size: int = 4096,
) -> dict[str, float]:
    """Recall and rank both ways, and the loss, over the samples of all ranks.

    An image and a text belong together if their sample is the same; a sample may have several of each, on one
    rank. A query's rank is that of its best match. Equal scores rank by sample, then by position in the
    sample. A row whose sample lacks the other side is a candidate, not a query.

    The loss is CLIP's (Radford et al. 2021, figure 3) with every sample that has both sides, by its first
    image and its first text, as ONE batch: it depends on the data alone, not on a batch size or the number of
    ranks, and therefore is higher than a loss over small batches.

    Args:
        images: this rank's.
        texts: this rank's.
        logit_scale: the factor on the scores in the loss.
        processes: the ranks; every one calls this.
        chunk_size: candidates per tile.

    Returns:
        `image_to_text_` and `text_to_image_` with `R@1`, `R@5`, `R@10` (shares), `mean_rank` and
        `median_rank` (counted from 1); `clip_val_loss`.

    Raises:
        UserError: no sample has both sides.
    """
    counts = processes.all_gather_object((len(images.sample), len(texts.sample)))
    total = max(sum(column) for column in zip(*counts, strict=True))
    # Every tile has one shape, so that every score comes out of the same kernel: equal rows get equal scores
    # wherever they stand, and a tie is a tie on any number of ranks.
    columns = min(chunk_size, total)
    rows = min(max(1, _TILE_SCORES[images.features.device.type] // columns), total)
    metrics: dict[str, float] = {}
    loss = 0.0
    image_counts, text_counts = zip(*counts, strict=True)
    for name, queries, candidates, held in (
        ("image_to_text", images, texts, text_counts),
        ("text_to_image", texts, images, image_counts),
    ):
        scan = _Scan(queries, candidates, logit_scale, rows, columns)
        chunks = sum(-(-count // columns) for count in held)
        progress = Progress(f"{name}: chunks of candidates", chunks, is_primary=processes.is_primary)
        for chunk in _chunks(candidates, scan.answers, columns, processes):
            scan.meet(chunk)
            progress.advance()
        gathered = processes.all_gather_object((scan.ranks(), scan.losses()))
        ranks = torch.cat([ranks for ranks, _ in gathered])
        losses = torch.cat([losses for _, losses in gathered])
        if len(losses) == 0:
            raise UserError("retrieval: no sample has both an image and a text")
        metrics |= _figures(name, ranks)
        loss += float(losses.mean()) / 2
    return metrics | {"clip_val_loss": loss}


def nearest(
    queries: Tensor, candidates: Side, count: int, processes: Processes
) -> list[list[tuple[int, int]]]:
    """The candidates of all ranks that score highest for a few queries, best first.

    Args:
        queries: [Q, D], the same on every rank.
        candidates: this rank's.
        count: how many to return for each query; fewer where there are fewer.
        processes: the ranks; every one calls this.

    Returns:
        For each query (sample, position in the sample); equal scores rank by them.
    """
    if not len(queries):
        return []
    scores = similarity(queries.to(candidates.features.device), candidates.features)
    # The rows ascend by order, and a stable sort keeps it among equals.
    best, rows = (part[:, :count] for part in scores.sort(dim=1, descending=True, stable=True))
    own = list(zip((-best).tolist(), candidates.order[rows].tolist(), strict=True))
    found = []
    for parts in zip(*processes.all_gather_object(own), strict=True):
        ranked = sorted(entry for scores, orders in parts for entry in zip(scores, orders, strict=True))
        found.append([divmod(order, _POSITIONS) for _, order in ranked[:count]])
    return found


@dataclass
class _Chunk:
    """Candidates of one rank, at hand on every rank."""

    side: Side
    order: Tensor
    """[n] int64."""
    in_loss: Tensor
    """[n] bool."""


def _chunks(candidates: Side, in_loss: Tensor, chunk_size: int, processes: Processes) -> Iterator[_Chunk]:
    """The candidates of every rank, rank by rank, the same chunks at the same time on all."""
    labels = torch.stack([candidates.sample, candidates.order, in_loss.long()])
    for source, count in enumerate(processes.all_gather_object(labels.shape[1])):
        for start in range(0, count, chunk_size):
            stop = min(start + chunk_size, count)
            if source == processes.rank:
                features, facts = (
                    candidates.features[start:stop].contiguous(),
                    labels[:, start:stop].contiguous(),
                )
            else:
                features = candidates.features.new_empty(stop - start, candidates.features.shape[1])
                facts = labels.new_empty(3, stop - start)
            if processes.is_distributed:
                dist.broadcast(features, source)
                dist.broadcast(facts, source)
            sample, order, flag = facts
            yield _Chunk(Side(features, sample), order, flag.bool())


class _Scan:
    """The queries of this rank on their way past all candidates."""

    def __init__(self, queries: Side, own: Side, logit_scale: float, rows: int, columns: int) -> None:
        self._queries, self._scale, self._rows, self._columns = queries, logit_scale, rows, columns
        self._matched = torch.isin(queries.sample, own.sample)
        self._in_loss = self._matched & queries.is_first
        # Which of `own`, as candidates, the loss knows.
        self.answers = torch.isin(own.sample, queries.sample) & own.is_first
        count, device = len(queries.sample), queries.sample.device
        self._best = torch.full((count,), -math.inf, device=device)
        self._best_order = torch.zeros(count, dtype=torch.int64, device=device)
        self._pair_score = torch.zeros(count, device=device)
        self._ahead = torch.zeros(count, dtype=torch.int64, device=device)
        self._log_sum = torch.full((count,), -math.inf, dtype=torch.float64, device=device)
        for start in range(0, len(own.sample), columns):
            piece = slice(start, start + columns)
            self._find_matches(
                _Chunk(own.rows(start, start + columns), own.order[piece], self.answers[piece])
            )
        self._best[~self._matched] = math.inf

    def _tiles(self, chunk: _Chunk, *, all_tiles: bool) -> Iterator[tuple[slice, Tensor, slice, Tensor]]:
        """Tiles of scores, all or those with matches alone.

        Yields the rows of queries, their scores [rows, n], the columns outside of which there is no match,
        and whether each score inside them is one.
        """
        candidates = _padded(chunk.side.features, self._columns)
        for start in range(0, len(self._queries.sample), self._rows):
            stop = min(start + self._rows, len(self._queries.sample))
            queries = self._queries.rows(start, stop)
            low = int(torch.searchsorted(chunk.side.sample, queries.sample[:1]))
            high = int(torch.searchsorted(chunk.side.sample, queries.sample[-1:], right=True))
            if high > low or all_tiles:
                scores = similarity(_padded(queries.features, self._rows), candidates)
                near = slice(low, high)
                matches = queries.sample[:, None] == chunk.side.sample[near]
                yield slice(start, stop), scores[: stop - start, : len(chunk.order)], near, matches

    def _find_matches(self, chunk: _Chunk) -> None:
        """Note each query's best match in its rank's own candidates, where all of its matches are."""
        last = torch.iinfo(torch.int64).max
        for rows, scores, near, matches in self._tiles(chunk, all_tiles=False):
            of_matches = scores[:, near].masked_fill(~matches, -math.inf)
            best = of_matches.amax(dim=1)
            is_best = (of_matches == best[:, None]) & matches
            order = torch.where(is_best, chunk.order[near], last).amin(dim=1)
            better = best > self._best[rows]
            self._best[rows] = torch.where(better, best, self._best[rows])
            self._best_order[rows] = torch.where(better, order, self._best_order[rows])
            paired = matches & chunk.in_loss[near]
            self._pair_score[rows] += scores[:, near].masked_fill(~paired, 0).sum(dim=1)

    def meet(self, chunk: _Chunk) -> None:
        """Count who of the chunk ranks before the best match, and add its terms to the loss's denominator."""
        for rows, scores, near, matches in self._tiles(chunk, all_tiles=True):
            self._add_to_loss(rows, scores, chunk.in_loss)
            scores[:, near].masked_fill_(matches, -math.inf)
            self._ahead[rows] += count_ahead(scores, self._best[rows], self._best_order[rows], chunk.order)

    def _add_to_loss(self, rows: slice, scores: Tensor, in_loss: Tensor) -> None:
        if not bool(self._in_loss[rows].any() & in_loss.any()):
            return
        # Relative to the highest score there can be: fp32 is precise where the large terms are.
        logits = (scores - 1).mul_(self._scale)
        if not bool(in_loss.all()):
            logits.masked_fill_(~in_loss, -math.inf)
        self._log_sum[rows] = torch.logaddexp(self._log_sum[rows], logits.logsumexp(dim=1).double())

    def ranks(self) -> Tensor:
        """[m] int64 on the CPU: the ranks, from 0, of the queries that have a match."""
        return self._ahead[self._matched].cpu()

    def losses(self) -> Tensor:
        """[k] float64 on the CPU: the cross entropy of each query that the loss knows."""
        losses = self._log_sum - self._scale * (self._pair_score.double() - 1)
        return losses[self._in_loss].cpu()


def _padded(features: Tensor, rows: int) -> Tensor:
    return F.pad(features, (0, 0, 0, rows - len(features)))


def _figures(name: str, ranks: Tensor) -> dict[str, float]:
    shares = {f"{name}_R@{k}": float((ranks < k).double().mean()) for k in (1, 5, 10)}
    return shares | {
        f"{name}_mean_rank": float(ranks.double().mean()) + 1,
        f"{name}_median_rank": math.floor(statistics.median(ranks.tolist())) + 1,
    }
