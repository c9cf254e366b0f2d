"""Promise 5: the order of data is a function of (seed, stream, position), whatever reads it."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from shards import SIZE, numbers, tokenize, write_shards

from shardclip.errors import UserError
from shardclip.training import distributed
from shardclip.training.config import RunConfig, TrainConfig
from shardclip.training.data.config import DataConfig
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.loader import TrainLoader, merge_states, train_loader
from shardclip.training.data.order import (
    Position,
    Runs,
    epoch_runs,
    epoch_selection,
    share,
    streams_for,
)
from shardclip.training.data.sources import RawSample
from shardclip.training.data.streams import SeekingData
from shardclip.training.start import open_data

SPEC = ImageInput(size=SIZE)
STREAMS = 12
GLOBAL = 24


def loader(
    data: str, workers: int, rank: int, world: int, seed: int = 0, streams: int = STREAMS, **settings: Any
) -> TrainLoader:
    config = DataConfig(train_data=data, workers=workers, **settings)
    return train_loader(
        config,
        SPEC,
        tokenize,
        batch_size=GLOBAL // world,
        rank=rank,
        world_size=world,
        seed=seed,
        streams=streams,
    )


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def read(loaders: list[TrainLoader], steps: int) -> list[list[int]]:
    """The numbers of each global batch, ranks one after the other."""
    iterators = [iter(one) for one in loaders]
    batches = [flat(numbers(next(iterator)) for iterator in iterators) for _ in range(steps)]
    for one in loaders:
        one.close()
    return batches


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of four shards of 4, 12, 20 and 60 samples."""
    return write_shards(tmp_path_factory.mktemp("uneven"), [4, 12, 20, 60])


@pytest.fixture(scope="module")
def reference(uneven: str) -> list[list[int]]:
    """The global batches of three epochs as one process without workers reads them."""
    return read([loader(uneven, 0, 0, 1)], 12)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_global_batches_do_not_depend_on_ranks_and_workers(
    uneven: str, reference: list[list[int]], world: int, workers: int
) -> None:
    batches = read([loader(uneven, workers, rank, world) for rank in range(world)], 5)
    assert batches == reference[:5]  # not only the same sets: the same order


def test_three_epochs_meet_every_sample_once_each_in_different_orders(reference: list[list[int]]) -> None:
    epochs = [flat(reference[4 * epoch : 4 * epoch + 4]) for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(96))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_seed_repeats_and_another_differs(uneven: str, reference: list[list[int]]) -> None:
    assert read([loader(uneven, 0, 0, 1)], 3) == reference[:3]
    assert read([loader(uneven, 0, 0, 1, seed=1)], 3) != reference[:3]


def test_b05_more_readers_than_shards_and_uneven_shards_give_equal_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks of four workers over three shards of 4, 12 and 20 samples, three epochs of 36."""
    data = write_shards(tmp_path, [4, 12, 20])
    with caplog.at_level("INFO"):
        ranks = [loader(data, 4, rank, 2, streams=24) for rank in range(2)]
    assert "3 shards for 8 reading processes" in caplog.text
    seen = flat(read(ranks, 9))
    assert len(seen) == 9 * GLOBAL
    counts = np.bincount(seen, minlength=36)
    assert counts.tolist() == [6] * 36


def test_b37_what_a_worker_reads_changes_from_epoch_to_epoch(tmp_path: Path) -> None:
    data = write_shards(tmp_path, [12] * 8)
    ranks = [loader(data, 2, rank, 2, streams=4) for rank in range(2)]
    iterators = [iter(one) for one in ranks]
    shares: dict[tuple[int, int, int], set[str]] = {}
    orders: list[list[str]] = []
    for epoch in range(3):
        orders.append([])
        for _, (rank, iterator) in itertools.product(range(4), enumerate(iterators)):
            batch = next(iterator)
            orders[-1].extend(batch.keys)
            for worker, half in enumerate((batch.keys[:6], batch.keys[6:])):
                shares.setdefault((epoch, rank, worker), set()).update(half)
    for one in ranks:
        one.close()
    assert all(len(order) == len(set(order)) == 96 for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    for reader in itertools.product(range(2), range(2)):
        assert len({frozenset(shares[(epoch, *reader)]) for epoch in range(3)}) == 3


def test_b46_a_batch_mixes_shards_though_few_streams_read_them(tmp_path: Path) -> None:
    """Eight shards of one kind of picture each: a batch of 24 of two streams meets most of the kinds."""
    data = write_shards(tmp_path, [48] * 8)
    for batch in read([loader(data, 0, 0, 1, streams=2)], 8):
        assert len({number // 48 for number in batch}) >= 6


def test_b38_with_replacement_no_two_readers_draw_alike_and_weights_hold() -> None:
    """64 shards, eight streams: lists of an epoch differ, and weight 3 is drawn 3 times as often as 1."""
    _, run, _ = epoch_runs([64], [1.0], seed=5, epoch=0, resampled=True)
    lists = [tuple(run[stream * 8 : stream * 8 + 8].tolist()) for stream in range(8)]
    assert len(set(lists)) == 8
    assert len(set(run.tolist())) < 64
    source, _, _ = epoch_runs([4000, 4000], [1.0, 3.0], seed=5, epoch=0, resampled=True)
    expected, deviation = 0.75 * 8000, np.sqrt(8000 * 0.75 * 0.25)
    assert abs(int((source == 1).sum()) - expected) < 5 * deviation


def test_b38_without_replacement_every_run_comes_before_any_repeats() -> None:
    for factor in (1.0, 0.5, 2.0, 0.3):
        met = np.concatenate([epoch_selection(64, factor, 1, 0, epoch) for epoch in range(10)])
        for lap in range(len(met) // 64):
            assert sorted(met[lap * 64 : lap * 64 + 64].tolist()) == list(range(64))
        assert len(met) == int(64 * factor * 10)


def test_factors_set_how_often_each_source_is_met(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [24])
    write_shards(tmp_path / "b", [24], first=24)
    data = f"{tmp_path / 'a'}::{tmp_path / 'b'}"
    one = loader(data, 0, 0, 1, train_data_upsampling_factors="2::0.5")
    assert one.samples_per_epoch == 60
    counts = np.bincount(flat(read([one], 5)), minlength=48)
    assert counts[:24].tolist() == [4] * 24  # two epochs of 60 are five batches of 24
    assert counts[24:].tolist() == [1] * 24


@pytest.mark.parametrize("total", [1, 7, 96, 1000])
@pytest.mark.parametrize("streams", [1, 3, 12, 64])
def test_shares_cover_an_epoch_and_streams_stay_within_one_sample(total: int, streams: int) -> None:
    sums = np.zeros(streams, dtype=int)
    for epoch in range(5):
        edges = [share(total, epoch * total, stream, streams) for stream in range(streams)]
        assert edges[0][0] == 0
        assert edges[-1][1] == total
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
        sums += [stop - start for start, stop in edges]
        assert sums.max() - sums.min() <= 1


@pytest.mark.parametrize(
    ("world", "batch", "workers"), [(1, 8, 0), (2, 32, 3), (4, 32, 4), (8, 7, 4), (128, 256, 8), (3, 1, 2)]
)
def test_the_streams_of_a_new_run_fit_ranks_and_batch(world: int, batch: int, workers: int) -> None:
    streams = streams_for(world, batch, workers)
    assert streams % world == 0
    assert world * batch % streams == 0
    assert streams <= max(64, world * batch)


class Numbers:
    """A source of so many samples in shards of 1000, which are not read."""

    name = "numbers"
    grain = 128

    def __init__(self, samples: int) -> None:
        self.shard_samples = np.full(samples // 1000, 1000)
        self.located = 0

    def locate(self, shard: int, samples: np.ndarray) -> list[object]:
        self.located += len(samples)
        return [shard * 1000 + int(number) for number in samples]

    def fetch(self, entry: object) -> RawSample:
        return RawSample(str(entry))

    def shard_name(self, shard: int) -> str:
        return str(shard)


@pytest.mark.parametrize("taken", [0, 1, 1023, 1024, 23_456, 24_999])
def test_a_stream_goes_on_where_it_stopped_without_reading_what_lies_before(taken: int) -> None:
    whole = SeekingData([Numbers(100_000)], [1.0], seed=3, streams=4)
    position = Position(0, 0, taken, taken).integers()
    on = whole.stream(1, position, lambda name: None)
    ahead = [on.take() for _ in range(2)]
    assert whole.sources[0].located <= 2 * 1024
    stream = whole.stream(1, None, lambda name: None)
    behind = [stream.take() for _ in range(taken + 2)]
    assert behind[taken:] == ahead
    assert [place for _, place in ahead] == [taken, taken + 1]


def test_runs_cover_each_shard_once() -> None:
    runs = Runs.cut(np.array([5, 0, 3, 8]), 4)
    covered = [
        (int(shard), int(first) + offset)
        for shard, first, samples in zip(runs.shard, runs.first, runs.samples, strict=True)
        for offset in range(samples)
    ]
    assert covered == [(0, n) for n in range(5)] + [(2, n) for n in range(3)] + [(3, n) for n in range(8)]


def test_a_restart_reads_what_the_uninterrupted_run_reads_whatever_the_layout(
    uneven: str, reference: list[list[int]]
) -> None:
    first = [loader(uneven, 3, rank, 2) for rank in range(2)]
    assert read(first, 5) == reference[:5]
    state = json.loads(json.dumps(merge_states([one.state_dict() for one in first])))
    for world, workers in ((1, 0), (2, 3), (4, 1), (3, 2)):
        again = [loader(uneven, workers, rank, world, streams=STREAMS) for rank in range(world)]
        for one in again:
            one.load_state_dict(state)
        assert read(again, 5) == reference[5:10]


KILLED_RUN = """
import itertools, json, os, sys
sys.path[:0] = {paths!r}
from test_data_order import loader
from shards import numbers
from shardclip.training.data.loader import merge_states
rank = int(sys.argv[1])
one = loader({data!r}, 2, rank, 2)
for step, batch in enumerate(one, start=1):
    print(json.dumps([step, numbers(batch), batch.state]), flush=True)
    if step == 7:
        sys.stdin.read()
"""


def test_b40_kill_at_step_7_and_resume_on_1_2_and_4_ranks(
    uneven: str, reference: list[list[int]], tmp_path: Path
) -> None:
    """Two processes with two workers each are killed in step 7; their positions are those of step 6."""
    here = Path(__file__).parent
    script = KILLED_RUN.format(paths=[str(here), str(here.parent / "data")], data=uneven)
    states, seen = [], []
    for rank in range(2):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(7)]
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        states.append(lines[5][2])
        seen.append([line[1] for line in lines[:6]])
    assert [left + right for left, right in zip(*seen, strict=True)] == reference[:6]
    for world in (1, 2, 4):
        again = [loader(uneven, 1, rank, world) for rank in range(world)]
        for one in again:
            one.load_state_dict(merge_states(states))
        assert read(again, 6) == reference[6:12]


def test_augmentation_and_captions_follow_the_place_in_the_run(tmp_path: Path) -> None:
    """Crops of a picture of many colours: pixels, tokens and caption numbers equal under another layout."""
    from shards import crowded_shards

    data = crowded_shards(tmp_path, 24)
    settings: dict[str, Any] = {"json_text_key": "captions", "aug_cfg": ("scale=(0.2, 0.9)",)}
    for decode in ("fast", "exact"):
        one = next(iter(loader(data, 0, 0, 1, decode=decode, **settings)))
        two = [loader(data, 1, rank, 2, decode=decode, **settings) for rank in range(2)]
        halves = [next(iter(rank)) for rank in two]
        for rank in two:
            rank.close()
        assert one.keys == halves[0].keys + halves[1].keys
        for name in ("images", "texts", "caption_id"):
            parts = np.concatenate([getattr(half, name).numpy() for half in halves])
            np.testing.assert_array_equal(getattr(one, name).numpy(), parts)
        assert len(set(one.caption_id.tolist())) > 1


def opened(folders: list[str], settings: dict[str, Any]) -> str | list[int]:
    """What a run's start says of the data on one of two hosts, each with a folder of its own."""
    processes = distributed.current()
    os.chdir(folders[processes.rank])
    here = replace(processes, host=f"host{processes.rank}")
    config = TrainConfig(
        data=DataConfig(train_data=".", workers=0, **settings), run=RunConfig(batch_size=4, epochs=2)
    )
    try:
        return [open_data(config, SPEC, tokenize, here)[1].steps]
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("settings", [{}, {"train_num_samples": 32}])
def test_ranks_that_see_other_data_do_not_start(ranks: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Copies of a folder of four shards: whole ones, one without a shard, and one without another."""
    for name in "abcd":
        write_shards(tmp_path / name, [8] * 4)
    os.remove(tmp_path / "c" / "00001.tar")
    os.remove(tmp_path / "d" / "00002.tar")
    whole, copy, lacking, lacking_another = (str(tmp_path / name) for name in "abcd")
    assert ranks(2).run(opened, [whole, copy], settings) == [[8], [8]]
    for folders in ([whole, lacking], [lacking, lacking_another]):
        said = ranks(2).run(opened, folders, settings)
        assert said[0] == said[1]
        assert re.search(r"rank 0 \(host0\): . local.*rank 1 \(host1\): 3 local.*shardclip doctor", said[0])
