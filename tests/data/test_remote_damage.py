"""Shards read from their front, cut or damaged: what is whole arrives, and the rest is missed aloud."""

import gzip
import tarfile
from pathlib import Path
from typing import Any

import pytest
from shards import sample, write_shards, write_tar

from shardclip.training.data import remote
from shardclip.training.data.remote import RemoteShard, Unreadable

WANTED = {"image": ("png",), "text": ("txt",)}
SAMPLE_BYTES = 3 * 1024
"""Each of a sample's three members is a header and one block."""


def shard_of(url: str, retries: int = 0) -> RemoteShard:
    return RemoteShard(url, WANTED, "first-dot", retries, pause=0)


def long_named(number: int) -> list[tuple[str, bytes]]:
    """A sample whose members have blocks before their headers, for the names."""
    return [(f"{'folder/' * 20}{name}", content) for name, content in sample(number, json=None)]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_only_the_end_mark_is_the_end_of_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: int, pack: Any
) -> None:
    """Cut before each block and inside it."""
    monkeypatch.setattr(tarfile.TarFile, "format", form)
    shard = shard_of(write_tar(tmp_path / "a.tar", [member for n in range(3) for member in long_named(n)]))
    whole = [raw.parts for raw in shard.samples()]
    assert [sorted(parts) for parts in whole] == [["image", "text"]] * 3
    assert len(list(shard.keys())) == 3
    content = (tmp_path / "a.tar").read_bytes()
    last_block = len(content.rstrip(b"\0")) // 512
    for cut in (512 * block + more for block in range(1, last_block + 1) for more in (0, 100)):
        (tmp_path / "cut").write_bytes(pack(content[:cut]))
        shard = shard_of(f"{tmp_path}/cut")
        *found, missing = shard.samples()
        assert [raw.parts for raw in found] == whole[: len(found)]
        assert missing.problem == "shard cannot be read to its end"
        with pytest.raises(Unreadable):
            list(shard.keys())


def test_a_header_of_noise_is_not_the_end(tmp_path: Path, caplog: Any) -> None:
    write_shards(tmp_path, [8])
    content = bytearray((tmp_path / "00000.tar").read_bytes())
    noise = 3 * SAMPLE_BYTES
    content[noise : noise + 512] = b"x" * 512
    (tmp_path / "a.tar").write_bytes(content)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(content))
    for name in ("a.tar", "a.tar.gz"):
        *found, missing = shard_of(f"pipe:cat {tmp_path}/{name}").samples()
        assert [raw.key[-3:] for raw in found] == ["000", "001"]
        assert missing.problem == "shard cannot be read to its end"
    assert caplog.text.count(f"neither a member nor the end at byte {noise}: invalid header") == 2


def test_a_compressed_shard_that_is_cut_is_not_at_its_end(tmp_path: Path) -> None:
    write_shards(tmp_path, [40])
    packed = gzip.compress((tmp_path / "00000.tar").read_bytes())
    for cut in (*range(1, 30), *range(200, len(packed) - 200, 300)):
        (tmp_path / "a.tar.gz").write_bytes(packed[:cut])
        *found, missing = shard_of(f"{tmp_path}/a.tar.gz").samples()
        assert [sorted(raw.parts) for raw in found] == [["image", "text"]] * len(found)
        assert missing.problem == "shard cannot be read to its end"


def test_a_sample_of_which_only_a_part_has_come_is_read_whole_by_the_next_attempt(tmp_path: Path) -> None:
    """The first output of the command ends inside the header of a caption whose picture is there."""
    write_shards(tmp_path, [6])
    path, tried = tmp_path / "00000.tar", tmp_path / "tried"
    cut = 3 * SAMPLE_BYTES + 1024 + 100
    found = list(
        shard_of(f"pipe:test -e {tried} && cat {path} || head -c {cut} {path}; touch {tried}", 1).samples()
    )
    assert tried.exists()
    assert [raw.key[-3:] for raw in found] == [f"{number:03d}" for number in range(6)]
    assert [sorted(raw.parts) for raw in found] == [["image", "text"]] * 6


def test_a_shard_of_nothing_is_whole(tmp_path: Path) -> None:
    shard = shard_of(write_tar(tmp_path / "a.tar", []))
    assert list(shard.samples()) == []
    assert list(shard.keys()) == []


def test_a_failure_is_told_in_words(tmp_path: Path) -> None:
    shard = shard_of(f"{tmp_path}/gone.tar.gz")
    list(shard.samples())
    assert shard.failure == "No such file or directory"
    write_shards(tmp_path, [4])
    (tmp_path / "cut.tar.gz").write_bytes(gzip.compress((tmp_path / "00000.tar").read_bytes())[:300])
    shard = shard_of(f"{tmp_path}/cut.tar.gz")
    list(shard.samples())
    assert shard.failure == "neither a member nor the end at byte 4096: truncated header"


def test_a_failure_without_words_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(url: str) -> None:
        raise TimeoutError

    monkeypatch.setattr(remote, "open_stream", silent)
    shard = shard_of("s3://somewhere/0.tar")
    list(shard.samples())
    assert shard.failure == "TimeoutError"
