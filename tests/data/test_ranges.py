"""Pieces of shards in a store."""

from pathlib import Path

import fsspec
import pytest

from shardclip.training.data.ranges import Pieces


@pytest.mark.parametrize(("offset", "size", "expected"), [(2, 3, b"cde"), (2, 0, b""), (0, 0, b"")])
def test_a_piece_has_the_bytes_that_were_asked_for(
    tmp_path: Path, bucket: str, offset: int, size: int, expected: bytes
) -> None:
    url = f"{bucket}/{tmp_path.name}/0.tar"
    with fsspec.open(url, "wb") as file:
        file.write(b"abcdefgh")
    assert Pieces().read(url, offset, size) == expected
