"""A picture of what a model finds: pictures with the captions found for them, captions with the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont, ImageOps

SIDE = 56
"""Pixels of one picture's side."""
CAPTIONS, PICTURES = 4, 8
"""Found ones that are shown for each query."""
RIGHT, WRONG = "#1a7f37", "#57606a"
_ROW = SIDE + 8
_TOP = 34
_WIDTH = 1120
_MIDDLE = 470
_LINE = 52
"""Characters of a caption found that fit beside a picture."""


@dataclass(frozen=True)
class Found:
    """One candidate that ranks among the first."""

    picture: Image.Image | None
    """None where captions are asked for."""
    caption: str
    is_right: bool
    """Whether it belongs to the query's sample."""


@dataclass(frozen=True)
class Query:
    """What was asked for, and the best of what was found, best first."""

    picture: Image.Image | None
    """None where a caption asks."""
    caption: str
    found: tuple[Found, ...]


def contact_sheet(
    pictures: Sequence[Query], captions: Sequence[Query], headings: tuple[str, str]
) -> Image.Image:
    """One sheet: on the left pictures and the captions found, on the right captions and the pictures found.

    The right answer is green.

    Args:
        pictures: queries with a picture.
        captions: queries by caption; what they found has pictures.
        headings: of the left and of the right half.
    """
    rows = max(len(pictures), len(captions), 1)
    sheet = Image.new("RGB", (_WIDTH, _TOP + rows * _ROW), "white")
    pen = ImageDraw.Draw(sheet)
    for left, heading in zip((12, _MIDDLE), headings, strict=True):
        pen.text((left, 8), heading, "black", _font(16))
    for row, query in enumerate(pictures):
        _picture_to_captions(sheet, _TOP + row * _ROW, query)
    for row, query in enumerate(captions):
        _caption_to_pictures(sheet, _TOP + row * _ROW, query)
    return sheet


def _picture_to_captions(sheet: Image.Image, top: int, query: Query) -> None:
    _paste(sheet, query.picture, 12, top)
    pen = ImageDraw.Draw(sheet)
    for place, found in enumerate(query.found[:CAPTIONS]):
        at = (24 + SIDE, top + place * SIDE // CAPTIONS)
        pen.text(at, _one_line(found.caption)[:_LINE], RIGHT if found.is_right else WRONG, _font(12))


def _caption_to_pictures(sheet: Image.Image, top: int, query: Query) -> None:
    pen = ImageDraw.Draw(sheet)
    pen.multiline_text((_MIDDLE, top + 2), _broken(query.caption), "black", _font(12))
    shown = query.found[:PICTURES]
    for place, found in enumerate(shown):
        left = _WIDTH - (PICTURES - place) * _ROW
        _paste(sheet, found.picture, left, top)
        if found.is_right:
            pen.rectangle((left - 3, top - 3, left + SIDE + 2, top + SIDE + 2), outline=RIGHT, width=3)


def _paste(sheet: Image.Image, picture: Image.Image | None, left: int, top: int) -> None:
    if picture is not None:
        sheet.paste(ImageOps.pad(picture.convert("RGB"), (SIDE, SIDE), color="white"), (left, top))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _broken(caption: str, length: int = 19, lines: int = 4) -> str:
    """The caption in a few short lines, cut at spaces where there are any."""
    broken = [""]
    for word in caption.split():
        if len(broken[-1]) + len(word) < length:
            broken[-1] = f"{broken[-1]} {word}".strip()
        else:
            broken.append(word[:length])
    return "\n".join([line for line in broken if line][:lines])


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
