"""A picture of what a model finds: pictures with the names found for them, names with the pictures found."""

from pathlib import Path

import torch
from drawings import Drawing
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

ROWS = 14
SIDE = 56
"""Pixels of one drawing."""
NAMES, PICTURES = 4, 8
"""Shown for each query."""
WIDTH = 1120
MIDDLE = 470
RIGHT, WRONG = "#1a7f37", "#57606a"


def draw_contact_sheet(drawings: list[Drawing], scores: Tensor, out: Path) -> None:
    """Write a PNG with some queries of each kind and the best of what was found, the right answer in green.

    Args:
        drawings: the candidates and, evenly spaced, the queries.
        scores: [n, n], similarity of picture i to the name of j.
        out: the file.
    """
    queries = torch.linspace(0, len(drawings) - 1, min(2 * ROWS, len(drawings))).long().tolist()
    pages = queries[0::2], queries[1::2]
    sheet = Image.new("RGB", (WIDTH, 34 + max(map(len, pages)) * (SIDE + 8)), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((12, 8), "picture -> names", "black", _font(16))
    pen.text((MIDDLE, 8), "name -> pictures", "black", _font(16))
    for row, query in enumerate(pages[0]):
        _picture_to_names(sheet, 34 + row * (SIDE + 8), query, drawings, scores[query])
    for row, query in enumerate(pages[1]):
        _name_to_pictures(sheet, 34 + row * (SIDE + 8), query, drawings, scores[:, query])
    sheet.save(out)


def _picture_to_names(
    sheet: Image.Image, top: int, query: int, drawings: list[Drawing], scores: Tensor
) -> None:
    sheet.paste(drawings[query].picture.resize((SIDE, SIDE)), (12, top))
    pen = ImageDraw.Draw(sheet)
    for place, found in enumerate(scores.topk(min(NAMES, len(scores))).indices.tolist()):
        at = (24 + SIDE, top + place * SIDE // NAMES)
        pen.text(at, drawings[found].name[:52], RIGHT if found == query else WRONG, _font(12))


def _name_to_pictures(
    sheet: Image.Image, top: int, query: int, drawings: list[Drawing], scores: Tensor
) -> None:
    pen = ImageDraw.Draw(sheet)
    first, _, rest = _broken(drawings[query].name)
    pen.multiline_text((MIDDLE, top + 14), f"{first}\n{rest}", "black", _font(12))
    for place, found in enumerate(scores.topk(min(PICTURES, len(scores))).indices.tolist()):
        left = WIDTH - (PICTURES - place) * (SIDE + 8)
        sheet.paste(drawings[found].picture.resize((SIDE, SIDE)), (left, top))
        if found == query:
            pen.rectangle((left - 3, top - 3, left + SIDE + 2, top + SIDE + 2), outline=RIGHT, width=3)


def _broken(name: str, length: int = 18) -> tuple[str, str, str]:
    """The name in two lines, cut at a space if it is long."""
    return (name, "", "") if len(name) <= length else name[:40].partition(" ")


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
