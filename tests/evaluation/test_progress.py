"""A long evaluation says how far it is, on one rank and not too often."""

import logging

import pytest

from shardclip.training.evaluation import progress
from shardclip.training.evaluation.progress import Progress


def test_a_line_every_quarter_of_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO)
    counted = [Progress("chunks", 2000, is_primary=True), Progress("texts", None, is_primary=True)]
    silent = Progress("nothing", 2000, is_primary=False)
    for _ in range(1500):
        now[0] += 1 / 64
        for each in (*counted, silent):
            each.advance()
    assert caplog.messages == ["chunks: 961 of 2,000", "texts: 961"]
