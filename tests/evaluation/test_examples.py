"""Nearest neighbours at evaluation: the right ones, from all ranks, drawn with the evaluation's figures."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from data.shards import sample, write_tar
from evaluation import small
from PIL import Image, ImageDraw

from shardclip.training.data.config import DataConfig
from shardclip.training.data.finite import pairs
from shardclip.training.distributed import current
from shardclip.training.evaluation.config import EvaluationConfig
from shardclip.training.evaluation.contact_sheet import RIGHT, Found, Query, contact_sheet
from shardclip.training.evaluation.results import Result
from shardclip.training.evaluation.retrieval import Side, nearest
from shardclip.training.evaluation.run import evaluate

COLORS = ("red", "lime", "blue", "black", "white", "yellow", "cyan", "magenta")


def query(color: str, right: bool) -> Query:
    """A picture or caption that finds all colours, its own marked as the right one or as a wrong one."""
    found = tuple(Found(Image.new("RGB", (20, 10), c), f"a {c} thing", right and c == color) for c in COLORS)
    return Query(Image.new("RGB", (20, 10), color), f"a {color} thing", found)


def test_the_right_answer_alone_is_green() -> None:
    green = tuple(bytes.fromhex(RIGHT[1:]))
    counts = []
    for right in (True, False):
        queries = [query(color, right) for color in COLORS]
        sheet = contact_sheet(queries, queries, ("left", "right"))
        colors = {color: count for count, color in sheet.getcolors(2**20)}
        counts.append(colors.get(green, 0))
    assert counts[0] > 1000
    assert counts[1] == 0


def side(start: int, stop: int) -> Side:
    """Rows of 40 candidates, two to a sample; every row occurs twice, so that scores tie."""
    features = F.normalize(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    return Side(torch.cat([features, features])[start:stop], torch.arange(40)[start:stop] // 2)


def found_on_ranks() -> list[list[tuple[int, int]]]:
    processes = current()
    edges = [40 * rank // processes.world_size // 2 * 2 for rank in range(processes.world_size + 1)]
    own = side(edges[processes.rank], edges[processes.rank + 1])
    return nearest(side(0, 3).features, own, 5, processes)


def test_nearest_are_those_of_all_ranks_and_ties_go_by_sample(ranks: Any) -> None:
    every = side(0, 40)
    scores = every.features[:3] @ every.features.T
    expected = []
    for row in scores.tolist():
        best = sorted(range(40), key=lambda place: (-row[place], place))[:5]
        expected.append([(place // 2, place % 2) for place in best])
    assert expected[0][:2] == [(0, 0), (10, 0)]
    for world_size in (1, 2):
        assert ranks(world_size).run(found_on_ranks) == [expected] * world_size


def evaluated(folder: Path) -> list[Result]:
    return evaluate(
        small.engine("none" if current().world_size == 1 else "ddp").module,
        EvaluationConfig(val_examples=3, val_batch_size=4),
        DataConfig(val_data=str(folder), workers=0),
        small.IMAGE_INPUT,
        small.tokenize,
        processes=current(),
    )


def test_one_picture_on_any_number_of_ranks_with_the_figures_of_the_run(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_pairs(tmp_path / "pairs", repeated=False)
    written: list[str] = []
    write = ImageDraw.ImageDraw.text

    def note(pen: ImageDraw.ImageDraw, at: Any, text: str, *more: Any, **named: Any) -> None:
        written.append(text)
        write(pen, at, text, *more, **named)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", note)
    (alone,) = evaluated(tmp_path / "pairs")
    assert alone.picture is not None
    for way, heading in (("image_to_text", "picture -> captions"), ("text_to_image", "caption -> pictures")):
        assert f"{heading}: R@1 {alone.metrics[f'{way}_R@1']:.1%}" in written
    assert sum(text.endswith(" thing") for text in written) >= 3 * 4
    assert len(alone.picture.getcolors(2**20)) > 20
    (first, *_), (second, *_) = ranks(2).run(evaluated, tmp_path / "pairs")
    assert second.picture is None
    assert first.picture.tobytes() == alone.picture.tobytes()


def test_a_sample_is_found_again_behind_one_that_was_left_out(tmp_path: Path) -> None:
    members = [member for n in range(6) for member in sample(n, **({"txt": None} if n == 1 else {}))]
    config = DataConfig(val_data=write_tar(tmp_path / "0.tar", members), workers=0)
    found = pairs(config, small.IMAGE_INPUT, small.tokenize, batch_size=4, rank=0, world_size=1)
    first, second = list(found)
    assert (first.samples, second.samples) == (3, 2)
    for turn, batch in enumerate((first, second)):
        for row, key in enumerate(batch.keys):
            again = found.read_again(key, turn, row)
            assert again is not None
            assert again.key == key
    assert found.read_again("another", 0, 0) is None
