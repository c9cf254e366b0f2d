"""What bad data gets: counted by reason, or a message that says what is wrong and what to do."""

import multiprocessing
import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shards import SIZE, numbers, picture, sample, tokenize, write_shards, write_tar
from torch.utils.data import DataLoader

from shardclip.errors import UserError
from shardclip.training.data.batch import Batch
from shardclip.training.data.config import DataConfig
from shardclip.training.data.finite import pairs
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.loader import TrainLoader, account, merge_states, train_loader

SPEC = ImageInput(size=SIZE)


def loader(
    data: str, batch_size: int = 4, workers: int = 0, streams: int = 1, **settings: Any
) -> TrainLoader:
    settings.setdefault("max_skip_rate", 1.0)
    config = DataConfig(train_data=data, workers=workers, **settings)
    return train_loader(
        config, SPEC, tokenize, batch_size=batch_size, rank=0, world_size=1, seed=0, streams=streams
    )


def take(one: TrainLoader, batches: int) -> list[Batch]:
    iterator = iter(one)
    return [next(iterator) for _ in range(batches)]


def one_bad(tmp_path: Path, **changes: Any) -> str:
    """Eight samples, of which number 3 is changed."""
    members = [member for n in range(8) for member in sample(n, **(changes if n == 3 else {}))]
    write_tar(tmp_path / "bad.tar", members)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("image cannot be decoded", {"png": None, "jpg": picture(3, (64, 64), "JPEG")[:-60]}),
        ("not an image", {"png": b"<html>404</html>"}),
        ("image too large", {"png": picture(3, (101, 100))}),
        ("no image", {"png": None}),
        ("no caption", {"txt": None}),
        ("empty caption", {"txt": b"  \n"}),
        ("caption is not UTF-8", {"txt": b"caf\xe9"}),
    ],
)
@pytest.mark.parametrize("decode", ["fast", "exact"])
def test_a_bad_sample_is_left_out_and_counted_by_reason(
    tmp_path: Path, reason: str, changes: dict[str, Any], decode: str
) -> None:
    one = loader(one_bad(tmp_path, **changes), batch_size=7, max_image_pixels=10_000, decode=decode)
    batches = take(one, 2)
    assert [sorted(numbers(batch)) for batch in batches] == [[0, 1, 2, 4, 5, 6, 7]] * 2
    assert sum(batch.skipped.get(reason, 0) for batch in batches) >= 1
    assert set().union(*(batch.skipped for batch in batches)) == {reason}
    assert one.state_dict()["skipped"][reason] == sum(batch.skipped.get(reason, 0) for batch in batches)


def test_unpaired_samples_serve_as_negatives_when_asked_for(tmp_path: Path) -> None:
    members = sample(0) + sample(1, png=None) + sample(2, txt=None) + sample(3)
    write_tar(tmp_path / "a.tar", members)
    (batch,) = take(loader(str(tmp_path), unpaired="negatives"), 1)
    assert batch.samples == 4
    assert len(batch.images) == len(batch.texts) == 3
    texts = {batch.keys[row].split(":")[1] for row in batch.text_sample}
    images = {batch.keys[row].split(":")[1] for row in batch.image_sample}
    assert texts == {"000000", "000001", "000003"}
    assert images == {"000000", "000002", "000003"}
    assert [int(id_) == -1 for id_ in batch.caption_id] == ["000002" in key for key in batch.keys]


def test_no_such_shard_names_it_and_what_there_is(tmp_path: Path) -> None:
    write_shards(tmp_path, [2])
    with pytest.raises(UserError, match=r"no such shard: .*0007\.tar .*00000\.tar"):
        loader(str(tmp_path / "0007.tar"))


def test_gaps_in_a_range_are_said_and_the_rest_is_read(tmp_path: Path, caplog: Any) -> None:
    write_shards(tmp_path, [4, 4, 4])
    os.remove(tmp_path / "00001.tar")
    batches = take(loader(str(tmp_path / "{00000..00002}.tar")), 2)
    assert sorted(chain.from_iterable(map(numbers, batches))) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert "1 of the 3 shards" in caplog.text
    assert "00001.tar" in caplog.text


@pytest.mark.parametrize("pair", [("input.png", "outputs.txt"), ("jpg", "json")])
def test_b33_shards_without_a_usable_sample_list_suffixes_found_and_wanted(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    members = [(f"{n}.{suffix}", b"x") for n in range(4) for suffix in pair]
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UserError) as caught:
        loader(str(tmp_path))
    message = str(caught.value)
    assert all(suffix in message for suffix in (*pair, "webp", "txt"))


def test_b35_names_with_dots_are_explained_and_read_when_asked_for(tmp_path: Path) -> None:
    members = [
        (f"photo v1.{n:05d}.{suffix}", content)
        for n in range(4)
        for suffix, content in (("png", picture(n)), ("txt", b"a photo"))
    ]
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match=r"photo v1\.00000\.png .*first dot.*--sample-key last-dot"):
        loader(str(tmp_path))
    (batch,) = take(loader(str(tmp_path), sample_key="last-dot"), 1)
    assert sorted(numbers(batch)) == [0, 1, 2, 3]


def test_members_out_of_order_and_keys_of_two_shards_stay_apart(tmp_path: Path) -> None:
    parts = [sample(n) for n in range(4)]
    write_tar(tmp_path / "0.tar", [part[column] for column in (1, 0, 2) for part in parts])
    write_tar(tmp_path / "1.tar", [(name, picture(9) if name.endswith("png") else c) for name, c in parts[0]])
    (batch,) = take(loader(str(tmp_path), batch_size=5), 1)
    assert sorted(numbers(batch)) == [0, 1, 2, 3, 9]
    assert len(set(batch.keys)) == 5


def test_a_cut_tar_gives_its_whole_members(tmp_path: Path) -> None:
    write_shards(tmp_path, [8])
    path = tmp_path / "00000.tar"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 + 100])
    one = loader(str(tmp_path), batch_size=1)
    assert 2 <= one.samples_per_epoch <= 5
    seen = {number for batch in take(one, 2 * one.samples_per_epoch) for number in numbers(batch)}
    assert seen >= set(range(one.samples_per_epoch - 1))


def test_an_empty_shard_is_no_fault(tmp_path: Path) -> None:
    write_shards(tmp_path, [4, 0, 4])
    assert sorted(chain.from_iterable(map(numbers, take(loader(str(tmp_path)), 2)))) == list(range(8))


def test_a_shard_that_vanishes_while_running_is_counted(tmp_path: Path) -> None:
    write_shards(tmp_path, [4, 4])
    one = loader(str(tmp_path))
    os.remove(tmp_path / "00001.tar")
    batches = take(one, 4)
    assert {number for batch in batches for number in numbers(batch)} == {0, 1, 2, 3}
    assert one.state_dict()["skipped"].keys() == {"shard cannot be read"}


def test_too_many_left_out_stop_the_run_with_the_reasons(tmp_path: Path) -> None:
    members = [member for n in range(40) for member in sample(n, **({"txt": b""} if n % 4 == 0 else {}))]
    write_tar(tmp_path / "a.tar", members)
    one = loader(str(tmp_path), max_skip_rate=0.1)
    with pytest.raises(UserError, match=r"--max-skip-rate 0\.1 .*empty caption \(10\d\)"):
        take(one, 1000)
    assert len(take(loader(str(tmp_path), max_skip_rate=0.3), 250)) == 250


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_usable_stops_after_one_pass(tmp_path: Path, workers: int) -> None:
    members = [member for n in range(8) for member in sample(n, png=b"not a picture")]
    write_tar(tmp_path / "a.tar", members)
    one = loader(str(tmp_path), workers=workers, streams=2)
    with pytest.raises(
        UserError, match=r"none of 8 samples in a row .*not an image \(8\).*suffixes found: png"
    ):
        take(one, 1)
    one.close()


class Stuck:
    """A tokenizer that kills its process, or does not come back before the context around it is left.

    A worker that stays behind holds up whoever clears its loader away, perhaps in the middle of another test.
    """

    def __init__(self, die: bool) -> None:
        self.die = die
        self._left = multiprocessing.Event()

    def __enter__(self) -> "Stuck":
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def __call__(self, captions: list[str]) -> torch.Tensor:
        if self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left.wait()
        return tokenize(captions)


@pytest.mark.parametrize(("workers", "die"), [(1, True), (1, False), (0, False)])
def test_a_dead_or_stuck_worker_is_told_with_rank_worker_shard_and_seconds(
    tmp_path: Path, workers: int, die: bool
) -> None:
    write_shards(tmp_path, [4])
    config = DataConfig(train_data=str(tmp_path), workers=workers, data_timeout=60.0 if die else 8.0)
    with Stuck(die) as stuck, pytest.raises(UserError) as caught:
        next(iter(train_loader(config, SPEC, stuck, batch_size=4, rank=1, world_size=2, seed=0)))
    message = str(caught.value)
    assert "rank 1" in message
    assert "worker 0" in message
    assert "00000.tar" in message
    assert ("has died" if die else "8 seconds") in message


def test_a_worker_that_dies_before_the_others_are_started_is_told_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: DataLoader[Any]) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    write_shards(tmp_path, [4])
    monkeypatch.setattr(DataLoader, "__iter__", start)
    with pytest.raises(UserError, match=r"reading process of rank 0 has died .*pid 7.*worker 0: nothing yet"):
        take(loader(str(tmp_path), workers=1), 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stuck_reader_of_validation_data_is_told_alike(tmp_path: Path, workers: int) -> None:
    write_shards(tmp_path, [4])
    config = DataConfig(val_data=str(tmp_path), workers=workers, data_timeout=8.0)
    expected = r"waited 8 seconds \(--data-timeout\).*worker 0: .*00000\.tar"
    with Stuck(die=False) as stuck, pytest.raises(UserError, match=expected):
        next(iter(pairs(config, SPEC, stuck, batch_size=4, rank=0, world_size=1)))


def test_a_position_of_other_data_or_another_cut_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [3, 5])
    write_shards(tmp_path / "b", [3, 6])
    write_shards(tmp_path / "c", [5, 3])
    state = loader(str(tmp_path / "a"), streams=2).state_dict()
    for other in ("b", "c"):
        with pytest.raises(UserError, match="not what the run was started with"):
            loader(str(tmp_path / other)).load_state_dict(state)
    with pytest.raises(UserError, match="2 streams, which must be a multiple of the 1 ranks and divide"):
        loader(str(tmp_path / "a"), batch_size=3).load_state_dict(state)


def test_b39_counters_are_what_was_read(tmp_path: Path) -> None:
    """100 samples asked for, two ranks of 8: six steps are 96, and the state says so."""
    data = write_shards(tmp_path, [128])
    config = DataConfig(train_data=data, train_num_samples=100, workers=0)
    ranks = [
        train_loader(config, SPEC, tokenize, batch_size=8, rank=rank, world_size=2, seed=0)
        for rank in range(2)
    ]
    seen = [number for one in ranks for batch in take(one, 6) for number in numbers(batch)]
    assert len(seen) == len(set(seen)) == 96
    assert [one.state_dict()["samples"] for one in ranks] == [96, 96]
    assert [one.samples_per_epoch for one in ranks] == [100, 100]


def accounts(seen: list[int]) -> tuple[int, int]:
    """Samples used, and those of them that were met before, by what a recorder saw."""
    return len(seen), len(seen) - len(set(seen))


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("factors", [None, "2::0.5"])
def test_b39_used_repeated_and_left_out_are_what_a_recorder_saw(
    tmp_path: Path, remote: bool, factors: str | None
) -> None:
    """Two sources of 16 and 32 samples, one of them without a caption, over some epochs and a restart."""
    changed = {20: {"txt": b""}}
    for name, numbers_ in (("a", range(16)), ("b", range(16, 48))):
        members = [member for n in numbers_ for member in sample(n, **changed.get(n, {}))]
        write_tar(tmp_path / name / "0.tar", members)
    place = f"pipe:cat {tmp_path}/{{}}/0.tar" if remote else f"{tmp_path}/{{}}/0.tar"
    data = "::".join(place.format(name) for name in "ab")
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for batches in (10, 7):
        one = loader(data, batch_size=12, train_data_upsampling_factors=factors)
        if state is not None:
            one.load_state_dict(state)
        seen += [number for batch in take(one, batches) for number in numbers(batch)]
        state = merge_states([one.state_dict()])
        assert (state["samples"], state["repeated"]) == accounts(seen)
    words = account(state or {})
    assert f"204 samples used, {accounts(seen)[1]} of them met before" in words
    assert "left out: empty caption (" in words


def test_b39_ranks_add_up(tmp_path: Path) -> None:
    """Two ranks, then one: at an epoch's end the sum is what a recorder saw."""
    config = DataConfig(train_data=write_shards(tmp_path, [16, 32]), workers=0)
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for world in (2, 1):
        ranks = [
            train_loader(
                config, SPEC, tokenize, batch_size=12 // world, rank=rank, world_size=world, seed=0, streams=2
            )
            for rank in range(world)
        ]
        for one in ranks:
            if state is not None:
                one.load_state_dict(state)
            seen += [number for batch in take(one, 8) for number in numbers(batch)]
        state = merge_states([one.state_dict() for one in ranks])
        assert (state["samples"], state["repeated"]) == accounts(seen)
    assert accounts(seen) == (192, 144)


def test_b39_with_replacement_what_an_epoch_draws_twice_is_repeated(tmp_path: Path) -> None:
    write_shards(tmp_path, [64])
    one = loader(str(tmp_path), batch_size=64, dataset_resampled=True)
    (batch,) = take(one, 1)
    assert batch.repeated == one.state_dict()["repeated"] == accounts(numbers(batch))[1] > 0


def test_pickled_members_are_never_opened(tmp_path: Path) -> None:
    """A member that would run code when unpickled lies beside the wanted ones."""
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "opened"),)

    bomb = pickle.dumps(Bomb())
    members = [member for n in range(4) for member in sample(n, pyd=bomb, pickle=bomb)]
    write_tar(tmp_path / "a.tar", members)
    (batch,) = take(loader(str(tmp_path)), 1)
    assert sorted(numbers(batch)) == [0, 1, 2, 3]
    assert not (tmp_path / "opened").exists()


def test_batches_hold_what_the_contract_says(tmp_path: Path) -> None:
    write_shards(tmp_path, [8])
    (batch,) = take(loader(str(tmp_path), batch_size=8), 1)
    assert batch.images.dtype == torch.uint8
    assert batch.images.shape == (8, 3, *SIZE)
    assert batch.texts.dtype == torch.int64
    assert batch.image_sample.tolist() == batch.text_sample.tolist() == list(range(8))
    expected = tokenize([f"number {number}" for number in numbers(batch)])
    np.testing.assert_array_equal(batch.texts.numpy(), expected.numpy())
    assert len(set(batch.caption_id.tolist())) == 8
    assert batch.keys[0] == f"00000.tar:{numbers(batch)[0]:06d}"
