"""One pass: each sample once over ranks and workers, all captions, labels from every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
from shards import SIZE, number_of, numbers, picture, sample, tokenize, write_shards, write_tar

from shardclip.errors import UserError
from shardclip.training.data.config import DataConfig
from shardclip.training.data.finite import labelled_images, pairs
from shardclip.training.data.image_input import ImageInput

SPEC = ImageInput(size=SIZE)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_pairs_come_once_each_in_order(tmp_path: Path, world: int, workers: int) -> None:
    config = DataConfig(val_data=write_shards(tmp_path, [4, 0, 12, 20]), workers=workers)
    seen: list[int] = []
    for rank in range(world):
        one = pairs(config, SPEC, tokenize, batch_size=7, rank=rank, world_size=world)
        batches = list(one)
        assert len(batches) == len(one)
        assert one.samples == 36
        seen += [number for batch in batches for number in numbers(batch)]
    assert seen == list(range(36))


def test_all_captions_come_with_their_sample(tmp_path: Path) -> None:
    members = [
        member
        for n in range(4)
        for member in sample(n, json=json.dumps({"captions": [f"{n} {k}" for k in range(n + 1)]}).encode())
    ]
    write_tar(tmp_path / "a.tar", members)
    config = DataConfig(val_data=str(tmp_path), json_text_key="captions", workers=0)
    (batch,) = pairs(config, SPEC, tokenize, batch_size=9, rank=0, world_size=1)
    assert batch.text_sample.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert batch.texts.tolist() == tokenize([f"{n} {k}" for n in range(4) for k in range(n + 1)]).tolist()


def test_what_cannot_be_used_is_counted_and_fewer_than_ranks_is_no_fault(tmp_path: Path, caplog: Any) -> None:
    write_tar(tmp_path / "a.tar", sample(0) + sample(1, txt=b""))
    config = DataConfig(val_data=str(tmp_path), workers=0)
    ranks = [pairs(config, SPEC, tokenize, batch_size=4, rank=rank, world_size=4) for rank in range(4)]
    seen = [number for one in ranks for batch in one for number in numbers(batch)]
    assert seen == [0]
    assert sum((one.skipped for one in ranks), start=type(ranks[0].skipped)()) == {"empty caption": 1}
    assert "empty caption" in caplog.text


def labelled(config: DataConfig) -> list[tuple[int, int]]:
    return [
        (number_of(image), int(label))
        for rank in range(2)
        for images, labels in labelled_images(config, SPEC, batch_size=2, rank=rank, world_size=2, workers=0)
        for image, label in zip(images, labels, strict=True)
    ]


def test_labels_come_from_tars_folders_and_tables(tmp_path: Path) -> None:
    expected = [(number, number // 2) for number in range(6)]
    tar = [
        (f"{n:03d}.{suffix}", content)
        for n, label in expected
        for suffix, content in (("webp", picture(n, format="WEBP")), ("cls", str(label).encode()))
    ]
    rows = ["filepath,label"]
    for number, label in expected:
        path = tmp_path / "folder" / f"class {label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
        rows.append(f"{path},{label}")
    (tmp_path / "a.csv").write_text("\n".join(rows))
    write_tar(
        tmp_path / "tars" / "0.tar", [(n, picture(int(n[:3])) if n.endswith("webp") else c) for n, c in tar]
    )
    for data in ("tars", "folder", "a.csv"):
        assert labelled(DataConfig(val_data=str(tmp_path / data))) == expected


def test_samples_may_be_limited(tmp_path: Path) -> None:
    config = DataConfig(val_data=write_shards(tmp_path, [8]), val_num_samples=5, workers=0)
    batches = pairs(config, SPEC, tokenize, batch_size=2, rank=0, world_size=1)
    assert [number for batch in batches for number in numbers(batch)] == list(range(5))


def test_missing_validation_data_is_told() -> None:
    with pytest.raises(UserError, match="--val-data"):
        labelled(DataConfig())
