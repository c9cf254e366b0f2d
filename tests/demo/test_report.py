"""What the demo's report compares with."""

import io
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("resvg_py", reason="needs the extra [demo]")

from drawings import Drawing, chance, majority, pixel_baseline, read_drawings
from prepare import load_concepts, write_data
from report import table


def drawing(concept: str, artist: str, color: str, group: str = "objects") -> Drawing:
    png = io.BytesIO()
    Image.new("RGB", (16, 16), color).save(png, "png")
    return Drawing(concept, artist, f"a {color} thing", group, png.getvalue())


COLORS = (
    "red",
    "lime",
    "blue",
    "black",
    "white",
    "yellow",
    "cyan",
    "magenta",
    "gray",
    "orange",
    "navy",
    "brown",
)


def test_pixel_baseline_finds_the_nearest_thumbnail() -> None:
    queries = [drawing(color, "openmoji", color) for color in COLORS]
    same = [drawing(color, "twemoji", color) for color in reversed(COLORS)]
    assert pixel_baseline(queries, same) == {1: 1.0, 5: 1.0, 10: 1.0}
    # Red is drawn as what is farthest from it: eleven other drawings are nearer.
    inverted = [drawing(color, "twemoji", "cyan" if color == "red" else color) for color in COLORS]
    found = pixel_baseline(queries[:1], inverted)
    assert found == {1: 0.0, 5: 0.0, 10: 0.0}


def test_chance_and_majority() -> None:
    drawings = [
        drawing(color, "openmoji", color, "flags" if color == "red" else "objects") for color in COLORS[:4]
    ]
    assert chance(drawings) == {1: 0.25, 5: 1.0, 10: 1.0}
    assert majority(drawings) == 0.75


def test_table_shows_every_figure_beside_its_baseline() -> None:
    figures = {f"{way}_R@{k}": k / 20 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    drawings = [drawing(color, "openmoji", color) for color in COLORS]
    text = table(figures | {"acc1": 0.625}, drawings, {1: 0.31, 5: 0.49, 10: 0.55})
    for number in ("62.5%", "5.0%", "25.0%", "50.0%", "8.3%", "31.0%", "49.0%", "55.0%"):
        assert number in text


def test_drawings_are_read_as_they_were_written(tmp_path: Path) -> None:
    concepts = load_concepts()[::200]
    counts = write_data(concepts, tmp_path)
    drawings = read_drawings(tmp_path / "train")
    assert len(drawings) == counts["train"]
    assert {found.concept: found.name for found in drawings} == {c.key: c.name for c in concepts}
