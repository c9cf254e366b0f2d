"""Data to measure with: pictures that compress like photographs, in tars of .jpg and .txt members."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = ("a", "photo", "of", "the", "small", "red", "dog", "on", "blue", "table", "near", "old", "house")
"""Words that CLIP's tokenizer has a token for each."""


def photograph(size: tuple[int, int], chance: np.random.Generator) -> bytes:
    """A JPEG whose spectrum falls off about as a photograph's does, with correlated channels."""
    height, width = size
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf

    def layer() -> np.ndarray:
        phases = np.exp(2j * np.pi * chance.random(frequency.shape))
        values = np.fft.irfft2(frequency**-1.3 * phases, s=size)
        return values / values.std()

    grey = layer() * 45
    channels = [grey + layer() * 12 + chance.integers(90, 160) for _ in range(3)]
    file = io.BytesIO()
    Image.fromarray(np.stack(channels, -1).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def caption(words: int, chance: np.random.Generator) -> str:
    """So many words: two tokens more, with start and end mark."""
    return " ".join(chance.choice(WORDS, words))


def caption_words(samples: int, chance: np.random.Generator, mean: float = 18, limit: int = 77) -> np.ndarray:
    """[samples] words of captions: tokens log-normal with this mean, 3 % of them longer than the limit."""
    at_limit = 0.03
    sigma = 0.5
    mean_of_rest = (mean - at_limit * limit) / (1 - at_limit)
    tokens = chance.lognormal(np.log(mean_of_rest) - sigma**2 / 2, sigma, samples).round().clip(3, limit)
    tokens[chance.random(samples) < at_limit] = limit + 10
    return tokens.astype(int) - 2


def write_shard(path: Path, pictures: list[bytes], captions: Iterable[str]) -> None:
    """A tar of a sample for each caption."""
    with tarfile.open(path, "w") as tar:
        for number, text in enumerate(captions):
            for suffix, content in (("jpg", pictures[number % len(pictures)]), ("txt", text.encode())):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
