"""The index of member offsets: valid, whole, shared, and never in the way."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shards import sample, write_shards, write_tar

from shardclip.errors import UserError
from shardclip.training.data import index as module
from shardclip.training.data.doctor import main as doctor
from shardclip.training.data.index import build_index, main, shard_index, split_name


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("a/000.jpg", ("a/000", "jpg"), ("a/000", "jpg")),
        ("x.input.PNG", ("x", "input.png"), ("x.input", "png")),
        ("dir.d/photo v1.1.jpg", ("dir.d/photo v1", "1.jpg"), ("dir.d/photo v1.1", "jpg")),
        (".hidden", None, None),
        ("README", None, None),
        ("__meta__/x.json", None, None),
    ],
)
def test_names_are_cut_by_the_rule(name: str, first: Any, last: Any) -> None:
    assert split_name(name, "first-dot") == first
    assert split_name(name, "last-dot") == last


def test_members_lie_where_the_index_says(tmp_path: Path) -> None:
    write_shards(tmp_path, [5])
    path = tmp_path / "00000.tar"
    index = shard_index(str(path))
    content = path.read_bytes()
    offset, size = index.members(("txt",))
    texts = [content[o : o + s].decode() for o, s in zip(offset, size, strict=True)]
    assert texts == [f"number {number}" for number in range(5)]
    both = index.members(("jpg", "png"))[0]
    assert np.array_equal(both, index.members(("png",))[0])
    assert (index.members(("jpg",))[0] == -1).all()


def test_a_second_reading_scans_nothing_and_a_changed_shard_is_scanned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, [5])
    path = str(tmp_path / "00000.tar")
    shard_index(path)
    scans = []
    monkeypatch.setattr(module, "scan", lambda *args, scan=module.scan: scans.append(args) or scan(*args))
    assert len(shard_index(path)) == 5
    assert scans == []
    write_tar(Path(path), [member for number in range(7) for member in sample(number)])
    assert len(shard_index(path)) == 7
    assert len(scans) == 1


def test_a_half_written_index_is_made_anew(tmp_path: Path) -> None:
    write_shards(tmp_path, [5])
    path = str(tmp_path / "00000.tar")
    shard_index(path)
    (stored,) = (tmp_path / module.BESIDE).iterdir()
    stored.write_bytes(stored.read_bytes()[:100])
    assert len(shard_index(path)) == 5


def test_shards_in_a_place_that_cannot_be_written_are_indexed_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "data", [5])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data" / module.BESIDE).write_text("a file where the folder would be")
    assert len(shard_index(str(tmp_path / "data" / "00000.tar"))) == 5
    assert len(list((tmp_path / "cache").rglob("00000.tar.*.npz"))) == 1


def test_the_verb_counts_and_names_damage(tmp_path: Path, capsys: Any) -> None:
    write_shards(tmp_path, [5, 3])
    assert main([str(tmp_path)]) == 0
    assert "8 samples in 2 shards, suffixes json, png, txt" in capsys.readouterr().out
    path = tmp_path / "00001.tar"
    path.write_bytes(path.read_bytes()[:2000])
    assert build_index(str(tmp_path)) == 1
    assert f"damaged: {path}" in capsys.readouterr().out
    os.remove(path)
    with pytest.raises(UserError, match="no such shard"):
        main([str(path)])


def test_doctor_finds_what_is_wrong_and_draws_a_sheet(tmp_path: Path, capsys: Any) -> None:
    from PIL import Image

    write_shards(tmp_path, [12, 6, 12])
    write_tar(tmp_path / "00004.tar", [member for n in range(8) for member in sample(n, txt=b"")])
    os.remove(tmp_path / "00001.tar")
    words = [str(tmp_path), "--sheet", str(tmp_path / "sheet.png")]
    assert doctor(words) == 1
    said = " ".join(capsys.readouterr().out.split())
    for finding in (
        "32, of which 32 were looked at",
        "2: 00001, 00003",
        "empty caption",
        "8 (25.0%)",
        "no: 24",
    ):
        assert finding in said
    assert Image.open(tmp_path / "sheet.png").width > 900
    os.remove(tmp_path / "00004.tar")
    assert doctor(words) == 0
