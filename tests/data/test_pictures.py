"""The pictures of a batch, resized many at a time."""

import numpy as np
import pytest
import torch

from shardclip.training.data import pictures
from shardclip.training.data.decode import resize
from shardclip.training.data.pictures import Pictures

SIDES = [(40, 60), (32, 32), (64, 48), (33, 99), (32, 32)]


@pytest.mark.parametrize("limit", [0, 20_000, 2**25])
def test_they_are_those_resized_one_by_one_in_their_order(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "_WAITING_BYTES", limit)
    chance = np.random.default_rng(0)
    whole = [chance.integers(0, 256, (height + 8, width, 3), dtype=np.uint8) for height, width in SIDES]
    batch = Pictures((32, 32))
    for picture in whole:
        batch.add(picture[4:-4])
    expected = torch.stack([resize(picture[4:-4], (32, 32)) for picture in whole])
    assert torch.equal(batch.stacked(), expected)


def test_none_are_a_batch_of_none() -> None:
    assert Pictures((32, 48)).stacked().shape == (0, 3, 32, 48)


def test_a_crop_counts_as_the_picture_that_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    resized: list[int] = []
    monkeypatch.setattr(pictures, "_WAITING_BYTES", 100_000)
    monkeypatch.setattr(pictures, "resize", lambda pixels, size: resized.append(1) or resize(pixels, size))
    batch = Pictures((32, 32))
    batch.add(np.zeros((200, 200, 3), dtype=np.uint8)[:40, :40])
    assert resized == [1]
