"""The order of samples: which sample stands at which place of which stream. Pure arithmetic.

The runs (of consecutive samples of one shard) of an epoch are permuted by (seed, epoch) and laid end to end;
that sequence is cut into one interval for each stream; a stream reads its interval in blocks and permutes
each block by (seed, stream, epoch, block). After the epoch comes the next one, without end.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Samples that a stream shuffles together."""
LONGEST_RUN = 128
"""Samples of one shard that stay together in the order of the runs, at most."""
FINEST_CUT = 4096
"""Sources of fewer samples than this many are permuted sample by sample."""

Integers = NDArray[np.int64]


@dataclass
class Position:
    """Where a stream stands: four integers, all that resuming needs."""

    epoch: int = 0
    """Pass over the data, from 0."""
    before: int = 0
    """Samples of all epochs before this one, over all streams."""
    taken: int = 0
    """Samples of this stream's share of the epoch that lie behind it."""
    place: int = 0
    """Samples that the stream has read since the run's first start: what a sample's randomness hangs on."""

    def integers(self) -> list[int]:
        """The position as a checkpoint holds it."""
        return [self.epoch, self.before, self.taken, self.place]


def generator(*key: int) -> np.random.Generator:
    """Random numbers that are a function of `key` alone, the same on every machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def sample_seed(seed: int, stream: int, place: int) -> int:
    """What a sample's randomness hangs on, 0 .. 2^62 - 1: a hash of its place in the run.

    It is made for every sample; a `generator` would cost as much as a tenth of a small picture's decoding.
    """
    digest = hashlib.blake2b(struct.pack("<3Q", seed % 2**64, stream, place), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def run_length(samples: int, longest: int = LONGEST_RUN) -> int:
    """Samples of a run: few where the source is small (1 is a full shuffle), `longest` where it is large."""
    return max(1, min(longest, samples // FINEST_CUT))


@dataclass(frozen=True)
class Runs:
    """The runs that a source's shards are cut into: [R] arrays."""

    shard: Integers
    """Shard that the run belongs to."""
    first: Integers
    """The run's first sample in its shard."""
    samples: Integers
    """Samples of the run, 1 or more."""

    @staticmethod
    def cut(shard_samples: Integers, length: int) -> Runs:
        """The runs of `length` samples (the last of a shard may be shorter) of shards of so many samples."""
        per_shard = -(-shard_samples // length)
        shard = np.repeat(np.arange(len(shard_samples)), per_shard)
        number = np.arange(len(shard)) - np.repeat(np.cumsum(per_shard) - per_shard, per_shard)
        first = number * length
        return Runs(shard, first, np.minimum(length, shard_samples[shard] - first))


def epoch_selection(runs: int, factor: float, seed: int, source: int, epoch: int) -> Integers:
    """The runs of one source that an epoch meets, `factor` times each in the long run: run numbers.

    Epoch e takes the window [e * factor * runs, (e + 1) * factor * runs) of the endless sequence of
    permutations of all runs, so that a factor of 1 is each run once, and one of 0.5 every run once in two
    epochs.
    """
    start, stop = (int(np.floor(edge * factor * runs)) for edge in (epoch, epoch + 1))
    pieces = []
    while start < stop:
        lap, offset = divmod(start, runs)
        count = min(runs - offset, stop - start)
        pieces.append(generator(seed, 1, source, lap).permutation(runs)[offset : offset + count])
        start += count
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def epoch_draw(runs: list[int], factors: list[float], seed: int, epoch: int) -> tuple[Integers, Integers]:
    """An epoch's runs drawn with replacement, a run's weight being its source's factor: (source, run)."""
    random = generator(seed, 2, epoch)
    weights = np.repeat(np.array(factors, dtype=np.float64), runs)
    drawn = np.searchsorted(np.cumsum(weights), random.random(sum(runs)) * weights.sum(), side="right")
    edges = np.cumsum([0, *runs])
    source = np.searchsorted(edges, drawn, side="right") - 1
    return source, drawn - edges[source]


def epoch_runs(
    runs: list[int], factors: list[float], seed: int, epoch: int, resampled: bool
) -> tuple[Integers, Integers, NDArray[np.bool_]]:
    """The runs of an epoch in their order, over all sources: (source [K], run within the source [K], whether
    it was met before [K]). With replacement only what the same epoch drew before is known to have been met.
    """
    if resampled:
        source, run = epoch_draw(runs, factors, seed, epoch)
        again = np.ones(len(run), dtype=bool)
        again[np.unique(source * max(runs) + run, return_index=True)[1]] = False
        return source, run, again
    chosen = [
        epoch_selection(count, factor, seed, source, epoch)
        for source, (count, factor) in enumerate(zip(runs, factors, strict=True))
    ]
    source = np.repeat(np.arange(len(chosen)), [len(numbers) for numbers in chosen])
    # of the endless sequence of permutations the first is the first meeting with every run
    laps = [
        int(np.floor(epoch * factor * count)) + np.arange(len(numbers)) >= count
        for count, factor, numbers in zip(runs, factors, chosen, strict=True)
    ]
    order = generator(seed, 3, epoch).permutation(len(source))
    return source[order], np.concatenate(chosen)[order], np.concatenate(laps)[order]


def share(total: int, before: int, stream: int, streams: int) -> tuple[int, int]:
    """The interval [start, stop) of an epoch's `total` samples that a stream reads.

    Shares differ by one sample at most, and so do the sums of a stream's shares over any number of epochs
    (`before` is the number of samples of the earlier ones): stream s has floor((n + s) / S) of the first n
    samples, which add up to n (Hermite's identity).
    """
    numbers = np.arange(stream + 1)
    counts = (before + total + numbers) // streams - (before + numbers) // streams
    stop = int(counts.sum())
    return stop - int(counts[-1]), stop


def block_order(size: int, seed: int, stream: int, epoch: int, block: int) -> Integers:
    """The order in which a stream yields the `size` samples of one of its blocks."""
    return generator(seed, 4, stream, epoch, block).permutation(size)


def streams_for(world_size: int, batch_size: int, workers: int, at_most: int = 64) -> int:
    """How many streams a new run is cut into: a multiple of the ranks that divides the global batch.

    Per rank it is the largest divisor of the local batch that keeps the run at `at_most` streams and loads
    the workers evenly (within 15 %); at least one a worker where the batch allows it.
    """
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    busy = max(1, workers)

    def imbalance(per_rank: int) -> float:
        return -(-per_rank // busy) * busy / per_rank

    even = [d for d in divisors if imbalance(d) <= 1.15] or [min(divisors, key=imbalance)]
    fitting = [d for d in even if d * world_size <= at_most]
    return world_size * (fitting[-1] if fitting else even[0])
