"""A checkpoint is whole or absent: kills, full disks, damage and planted objects."""

import os
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from train_states import different, load_latest, open_checkpoints, state_of, step, whole

from shardclip.errors import UserError
from shardclip.training.checkpoint import checkpoints as checkpoints_module
from shardclip.training.checkpoint import published, storage
from shardclip.training.checkpoint.storage import PublishingWriter, fault


def save(folder: Path, samples: int, kind: str = "none") -> dict[str, torch.Tensor]:
    """A checkpoint of a state that depends on `samples`; what it holds."""
    state = state_of(kind)
    step(state, seed=samples)
    checkpoints = open_checkpoints(folder)
    checkpoints.save(samples, state)
    checkpoints.close()
    return whole(state)


def resumed(folder: Path, kind: str = "none") -> tuple[str | None, dict[str, torch.Tensor]]:
    """Name of the checkpoint that a new start takes, and what it loads from it."""
    state = state_of(kind)
    path = load_latest(folder, state)
    return path and path.name, whole(state)


def snapshot_while_training_goes_on(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The writing waits until the weights have changed. Published names before and after; differences."""
    state = state_of("fsdp")
    step(state)
    checkpoints = open_checkpoints(folder)
    checkpoints.save(4, state)
    checkpoints.wait()
    changed = threading.Event()
    write = PublishingWriter.write_data

    def write_late(self: PublishingWriter, *args: Any) -> Any:
        assert changed.wait(60)
        return write(self, *args)

    PublishingWriter.write_data = write_late  # type: ignore[method-assign]
    try:
        expected = whole(state)
        checkpoints.save(8, state)
        step(state, seed=1)
        during = [path.name for path in published(folder)]
    finally:
        changed.set()
        checkpoints.close()
        PublishingWriter.write_data = write  # type: ignore[method-assign]
    name, loaded = resumed(folder, "fsdp")
    return during, [path.name for path in published(folder)], [str(name), *different(expected, loaded)]


def test_b49_a_background_save_holds_the_state_of_its_call(ranks: Any, tmp_path: Path) -> None:
    for during, after, outcome in ranks(2).run(snapshot_while_training_goes_on, tmp_path):
        assert during == ["samples-000000000004"]
        assert after == ["samples-000000000004", "samples-000000000008"]
        assert outcome == ["samples-000000000008"]


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(number))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            _die()
        return function(*args, **kwargs)

    return wrapped


KILLS = {
    "before a rank writes": (1, "storage", "PublishingWriter", "write_data", 0),
    "within a rank's file": (1, "filesystem", None, "_write_item", 40),
    "before the checksums": (1, "storage", "FileCheck", "of", 0),
    "before the manifest": (0, "storage", None, "write_durably", 1),
    "before the rename": (0, "storage", None, "publish", 0),
    "before pruning": (0, "checkpoints", "Checkpoints", "_prune", 0),
}
"""Which rank dies, and at which call of which function."""


def killed_while_saving(
    folder: Path, victim: int, module: str, cls: str | None, name: str, calls: int
) -> None:
    owner = {"storage": storage, "filesystem": filesystem, "checkpoints": checkpoints_module}[module]
    owner = owner if cls is None else getattr(owner, cls)
    checkpoints = open_checkpoints(folder, keep_last=1)
    state = state_of("fsdp")
    step(state, seed=8)
    if checkpoints.rank == victim:
        setattr(owner, name, _die_at_call(calls, getattr(owner, name)))
    checkpoints.save(8, state)
    checkpoints.wait()


@pytest.mark.parametrize("moment", KILLS)
def test_b49_b50_a_kill_while_saving_leaves_the_previous_one(ranks: Any, tmp_path: Path, moment: str) -> None:
    before = ranks(2).run(save, tmp_path, 4, "fsdp")[0]
    with pytest.raises(AssertionError, match=r"the process died|Connection closed|reset by peer"):
        ranks(2).run(killed_while_saving, tmp_path, *KILLS[moment])
    published_already = moment == "before pruning"
    for name, loaded in ranks(2).run(resumed, tmp_path, "fsdp"):
        assert name == ("samples-000000000008" if published_already else "samples-000000000004")
        assert (different(before, loaded) == []) != published_already
    assert list(tmp_path.glob("tmp-*")) == []


def cut(path: Path) -> str:
    """Cut a file to half."""
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    return "bytes instead of"


def flip(path: Path) -> str:
    """Change one byte, not the size."""
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "has changed since it was written"


def lose(path: Path) -> str:
    """Remove a file."""
    (path / ".metadata").unlink()
    return ".metadata is missing"


def lose_manifest(path: Path) -> str:
    """Remove the list of files."""
    (path / "manifest.json").unlink()
    return "manifest.json is missing"


@pytest.mark.parametrize("damage", [cut, flip, lose, lose_manifest])
def test_b50_a_damaged_newest_one_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], str]
) -> None:
    before = save(tmp_path, 4)
    save(tmp_path, 8)
    expected = damage(published(tmp_path)[-1])
    name, loaded = resumed(tmp_path)
    assert name == "samples-000000000004"
    assert different(before, loaded) == []
    assert expected in caplog.text
    assert "samples-000000000008 is damaged" in caplog.text
    with pytest.raises(UserError, match=expected):
        open_checkpoints(tmp_path, resume=str(published(tmp_path)[-1])).to_resume()


def latest_name(folder: Path) -> str | None:
    path = open_checkpoints(folder).latest()
    return path and path.name


def test_b50_all_ranks_take_the_same_one(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(save, tmp_path, 4, "fsdp")
    ranks(2).run(save, tmp_path, 8, "fsdp")
    file = published(tmp_path)[-1] / "__1_0.distcp"  # only one of the ranks reads it
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert ranks(2).run(latest_name, tmp_path) == ["samples-000000000004"] * 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill_the_disk(folder: Path) -> tuple[list[str], list[str], str, list[str]]:
    """Saves until the disk is full: what was reported, what is there, the second failure, what resumes."""
    import logging

    reports: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reports.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardclip.training.checkpoint.checkpoints").addHandler(handler)
    state = state_of("fsdp")
    expected = whole(state)
    checkpoints = open_checkpoints(folder)
    checkpoints.save(4, state)
    checkpoints.wait()
    assert not reports
    step(state)  # the moments that this brings are what the disk has no room for
    checkpoints.save(8, state)
    checkpoints.wait()
    left = sorted(path.name for path in folder.iterdir())
    try:
        checkpoints.save(12, state)
        checkpoints.wait()
    except UserError as error:
        repeated = str(error)
    logging.getLogger("shardclip.training.checkpoint.checkpoints").removeHandler(handler)
    name, loaded = resumed(folder, "fsdp")
    return reports[:1], left, repeated, [str(name), *different(expected, loaded)]


def test_b50_a_full_disk_keeps_the_old_one_and_is_reported(ranks: Any, small_disk: Path) -> None:
    per_rank = ranks(2).run(fill_the_disk, small_disk)
    for reports, _, repeated, outcome in per_rank:
        assert "No space left on device" in reports[0]
        assert "training goes on" in reports[0]
        assert "The save before it failed too" in repeated
        assert outcome == ["samples-000000000004"]
    left_by_rank_0 = per_rank[0][1]
    assert left_by_rank_0 == ["samples-000000000004"]


class Planted:
    """An object that no checkpoint of ours holds; making one is what must not happen."""

    def __reduce__(self) -> Any:
        return _spring, ()


def _spring() -> None:
    raise RuntimeError("the planted object was unpickled")


def replant(path: Path, change: Callable[[Any], None]) -> None:
    """Rewrite a checkpoint's index."""
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def plant_in_index(path: Path) -> None:
    """In the index itself."""

    def change(index: Any) -> None:
        index.planner_data = Planted()

    replant(path, change)


def plant_as_entry(path: Path) -> None:
    """As an entry that is not a tensor, which DCP would unpickle."""
    torch.save(Planted(), path / "planted.distcp")

    def change(index: Any) -> None:
        key = next(iter(index.storage_data))
        index.state_dict_metadata[key.fqn] = BytesStorageMetadata()
        index.storage_data[key] = _StorageInfo("planted.distcp", 0, (path / "planted.distcp").stat().st_size)

    replant(path, change)


def plant_as_tensor(path: Path) -> None:
    """In the place of a tensor."""
    torch.save(Planted(), path / "planted.distcp")

    def change(index: Any) -> None:
        key = next(key for key in index.storage_data if key.fqn.startswith("model."))
        index.storage_data[key] = _StorageInfo("planted.distcp", 0, (path / "planted.distcp").stat().st_size)

    replant(path, change)


@pytest.mark.parametrize("plant", [plant_in_index, plant_as_entry, plant_as_tensor])
def test_b53_a_planted_object_is_refused_by_name(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    save(tmp_path, 4)
    (path,) = published(tmp_path)
    plant(path)
    state = state_of("none")
    with pytest.raises(UserError, match=r"test_faults\._spring"):
        open_checkpoints(tmp_path).load(path, state)


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (path,) = published(tmp_path)

    def change(index: Any) -> None:
        key = next(iter(index.storage_data))
        index.storage_data[key] = _StorageInfo("../../secret", 0, 1)

    replant(path, change)
    with pytest.raises(UserError, match="outside its folder"):
        open_checkpoints(tmp_path).load(path, state_of("none"))


def test_b53_every_tensor_of_every_file_loads_with_weights_only(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (path,) = published(tmp_path)
    index = storage.SafeReader(path).read_metadata()
    for place in index.storage_data.values():
        with (path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
        (path / "one").write_bytes(content)
        assert isinstance(torch.load(path / "one", weights_only=True), torch.Tensor)
    assert fault(path) is None


def test_what_is_left_of_a_killed_save_is_removed_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "tmp-samples-000000000004-1").mkdir()
    (tmp_path / "tmp-samples-000000000004-1" / "__0_0.distcp").write_bytes(b"half")
    assert open_checkpoints(tmp_path).latest() is None
    assert list(tmp_path.iterdir()) == []


def test_a_kill_between_replacing_and_renaming_brings_the_old_one_back(tmp_path: Path) -> None:
    before = save(tmp_path, 4)
    (path,) = published(tmp_path)
    path.rename(tmp_path / "tmp-samples-000000000004-1-replaced")
    name, loaded = resumed(tmp_path)
    assert name == path.name
    assert different(before, loaded) == []
    assert list(tmp_path.iterdir()) == [path]


def test_resume_latest_of_a_new_run_is_a_new_start(tmp_path: Path) -> None:
    assert open_checkpoints(tmp_path, resume="latest").to_resume() is None
    assert open_checkpoints(tmp_path).to_resume() is None
    with pytest.raises(UserError, match="not a whole checkpoint"):
        open_checkpoints(tmp_path, resume=str(tmp_path / "elsewhere")).to_resume()
