"""Checkpoints hold tensors and plain values: whatever else is found in one is refused by its name."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from train_states import open_checkpoints, save, state_of

from shardclip.errors import UserError
from shardclip.training.checkpoint import published


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
    with pytest.raises(UserError, match=r"test_checkpoint_safety\._spring"):
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
