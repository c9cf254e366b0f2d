"""What ends a run, said by several processes at once."""

import io
import sys

import pytest

from shardclip.errors import complain


class Writes(io.RawIOBase):
    """What standard error would have been asked to write, call by call."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.seen.append(bytes(data))
        return len(data)


@pytest.mark.parametrize("unbuffered", [True, False])
def test_a_complaint_is_one_write(unbuffered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYTHONUNBUFFERED too: the lines of two ranks had mixed in one log."""
    writes = Writes()
    how = {"write_through": True} if unbuffered else {"line_buffering": True}
    monkeypatch.setattr(
        sys, "stderr", io.TextIOWrapper(writes if unbuffered else io.BufferedWriter(writes), **how)
    )
    complain("two\nlines")
    assert writes.seen == [b"two\nlines\n"]
