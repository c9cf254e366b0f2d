"""The index of member offsets: valid, whole, shared, and never in the way."""

import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shards import picture, sample, write_shards, write_tar

from shardclip.errors import UserError
from shardclip.training import distributed
from shardclip.training.data import index as module
from shardclip.training.data.config import DataConfig
from shardclip.training.data.doctor import bytes_of, out_of_reach
from shardclip.training.data.doctor import doctor as examine_data
from shardclip.training.data.doctor import main as doctor
from shardclip.training.data.index import build_index, main, shard_index, shard_samples, split_name
from shardclip.training.data.remote import RemoteShard
from shardclip.training.data.tar import TarSource


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


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_that_are_not_utf8_are_read_and_can_be_shown(
    tmp_path: Path, format: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    members = [(f"caf\udce9{name}", content) for n in range(4) for name, content in sample(n)]
    members += [(f"{n}.\udce9", b"a suffix that is not UTF-8") for n in range(4)]
    path = write_tar(tmp_path / "0.tar", members, format=format)
    source = TarSource([path], DataConfig().wanted(), "first-dot")
    shard_index(path)
    monkeypatch.setattr(module, "scan", None)  # what follows is read from the index
    keys = shard_index(path).keys.tolist()
    assert keys[:2] == [b"caf\\xe9000000", b"caf\\xe9000001"]
    raw = source.fetch(source.locate(0, np.array([1]))[0])
    assert raw.key == "0.tar:caf\\xe9000001"
    assert raw.parts["text"] == b"number 1"
    from_its_front = RemoteShard(path, DataConfig().wanted(), "first-dot", retries=0)
    assert [one.key for one in from_its_front.samples()][1] == raw.key
    assert main([path]) == 0
    doctor([path, "--sheet", str(tmp_path / "sheet.png")])
    said = capsys.readouterr().out
    assert "\\xe9" in said
    said.encode()  # a lone surrogate has no UTF-8


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


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (3 * 3 * 1024 + 200, "cut short inside the header at byte 9216"),
        (3 * 3 * 1024, "cut short before the header at byte 9216"),
        (3 * 3 * 1024 + 600, "unexpected end of data"),
    ],
)
def test_a_tar_that_is_cut_anywhere_is_reported_and_read_up_to_there(
    tmp_path: Path, cut: int, said: str, caplog: Any
) -> None:
    write_shards(tmp_path, [5])
    path = tmp_path / "00000.tar"
    path.write_bytes(path.read_bytes()[:cut])
    index = shard_index(str(path))
    assert said in index.damage
    assert len(index) - ("data" in said) == 3
    assert shard_samples([str(path)], "first-dot").tolist() == [len(index)]
    assert f"1 of 1 shards are damaged ({path}: {index.damage})" in caplog.text


def test_a_header_that_is_noise_is_reported(tmp_path: Path) -> None:
    write_shards(tmp_path, [5])
    path = tmp_path / "00000.tar"
    content = bytearray(path.read_bytes())
    content[9216 : 9216 + 512] = b"x" * 512
    path.write_bytes(content)
    index = shard_index(str(path))
    assert index.damage == "no valid header at byte 9216"
    assert len(index) == 3


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


def visit(folders: list[str], data: str) -> int:
    """The doctor on one of two hosts, which have folders of their own under one path."""
    processes = distributed.current()
    os.chdir(folders[processes.rank])
    here = replace(processes, host=f"host{processes.rank}", local_rank=0, local_world_size=1)
    return examine_data(DataConfig(train_data=data), here)


def test_doctor_says_which_host_cannot_read_the_data(ranks: Any, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    write_shards(tmp_path / "a", [4, 4, 4])
    write_shards(tmp_path / "b", [4, 3])
    shards = "{00000..00002}.tar"
    assert ranks(2).run(visit, [folders[0]] * 2, shards) == [0, 0]
    assert ranks(2).run(visit, folders, shards) == [1, 1]
    sizes = [
        {shard: bytes_of(f"{folder}/{shard}") for shard in ("00001.tar", "00002.tar")} for folder in folders
    ]
    told = out_of_reach([("host0", sizes[0]), ("host1", sizes[1]), ("host1", {})])
    assert (
        told[0]
        == f"00001.tar: {sizes[0]['00001.tar']} bytes on host0, {sizes[1]['00001.tar']} bytes on host1"
    )
    assert "00002.tar on host1" in told[1]
    assert "No such file" in told[1]
    assert out_of_reach([("host0", {"a": 1}), ("host1", {})]) == ["a on host1: not there"]


def test_doctor_takes_the_settings_of_tables(tmp_path: Path, capsys: Any) -> None:
    """Those that the message of a column that is not there names."""
    (tmp_path / "0.png").write_bytes(picture(0))
    table = tmp_path / "data.csv"
    table.write_text("picture^words^class\n0.png^a dog^3\n", encoding="utf-8")
    words = [str(table), "--sheet", str(tmp_path / "sheet.png"), "--csv-separator", "^"]
    words += ["--csv-img-key", "picture", "--csv-caption-key", "words", "--csv-label-key", "class"]
    assert doctor(words) == 0
    assert "columns read: picture, words" in capsys.readouterr().out


def test_doctor_is_told_the_kind_of_data_that_the_name_does_not_say(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "0.png").write_bytes(picture(0))
    table = tmp_path / "pairs"
    table.write_text("filepath,title\n0.png,a dog\n", encoding="utf-8")
    words = [str(table), "--sheet", str(tmp_path / "sheet.png")]
    assert doctor(words) == 2
    assert "--dataset-type says so" in " ".join(capsys.readouterr().err.split())
    assert doctor([*words, "--dataset-type", "csv"]) == 0
