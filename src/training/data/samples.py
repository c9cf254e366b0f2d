"""From raw members to samples: which caption, what is left out and why, and the batch they make."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardclip.training.data.batch import Batch
from shardclip.training.data.config import DataConfig, suffixes
from shardclip.training.data.decode import Decoder, Pixels, Undecodable
from shardclip.training.data.order import sample_seed
from shardclip.training.data.pictures import Pictures
from shardclip.training.data.sources import RawSample

Tokenizer = Callable[[list[str]], Tensor]
"""Captions -> [T, L] token ids."""


class LeftOut(Exception):
    """A sample that cannot be used; the message is the reason that is counted."""


@dataclass
class Sample:
    """One sample on its way into a batch."""

    key: str
    pixels: Pixels | None
    """[h, w, 3] uint8, not resized yet; None for a caption without a picture."""
    captions: list[str]
    """One in training, all that there are in evaluation, none for a picture without a caption."""
    again: bool = False
    """See `RawSample`."""


class Captions:
    """Reads the captions of a sample and draws one."""

    def __init__(self, config: DataConfig) -> None:
        self._fields = suffixes(config.json_text_key) if config.json_text_key else ()
        self._weights = config.json_text_key_probs

    def of(self, raw: RawSample) -> list[list[str]]:
        """The captions of each field that holds any, in the order of the fields, empty ones left out.

        Raises:
            LeftOut: the text is not UTF-8, or the .json member is not valid.
        """
        content = raw.parts.get("json" if self._fields else "text")
        if content is None:
            return []
        assert isinstance(content, bytes)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise LeftOut("caption is not UTF-8") from error
        if not self._fields:
            return [[text.strip()]] if text.strip() else []
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise LeftOut(".json is not valid") from error
        record = record if isinstance(record, dict) else {}
        return [_texts(record.get(field)) for field in self._fields]

    def draw(self, raw: RawSample, seed: int) -> str | None:
        """One caption, chosen by `seed`: the field first (by priority or weight), then one of its list."""
        fields = self.of(raw)
        weights = self._weights or [1.0] * len(fields)
        filled = [(texts, weight) for texts, weight in zip(fields, weights, strict=False) if texts and weight]
        if not filled:
            return None
        chance = random.Random(seed)
        texts = filled[0][0]
        if self._weights is not None and len(filled) > 1:
            texts = chance.choices(*zip(*filled, strict=True))[0]
        return texts[0] if len(texts) == 1 else chance.choice(texts)


def _texts(value: Any) -> list[str]:
    """The captions in a .json field: a string or a list of them; anything else holds none."""
    values = value if isinstance(value, list) else [value]
    return [text.strip() for text in values if isinstance(text, str) and text.strip()]


class SampleMaker:
    """Makes samples of raw ones: decodes the picture, chooses the caption, says why one is left out."""

    def __init__(self, config: DataConfig, decoder: Decoder, all_captions: bool = False) -> None:
        self._captions = Captions(config)
        self._decoder = decoder
        self._all_captions = all_captions
        self._keep_unpaired = config.unpaired == "negatives"

    def make(self, raw: RawSample, *place: int) -> Sample:
        """The sample; its random choices are a function of `place` (seed, stream, place in the stream).

        Raises:
            LeftOut: it cannot be used.
        """
        if raw.problem is not None:
            raise LeftOut(raw.problem)
        seed = sample_seed(*place) if place else 0
        captions = self._chosen(raw, seed)
        content = raw.parts.get("image")
        if content is None and (not captions or not self._keep_unpaired):
            raise LeftOut("no image" if captions else "neither image nor caption")
        if not captions and not self._keep_unpaired:
            empty = {"text", "json"} & set(raw.parts)
            raise LeftOut("empty caption" if empty else "no caption")
        try:
            pixels = None if content is None else self._decoder(content, seed)
        except Undecodable as error:
            raise LeftOut(str(error)) from error
        return Sample(raw.key, pixels, captions, raw.again)

    def _chosen(self, raw: RawSample, seed: int) -> list[str]:
        if self._all_captions:
            return [text for texts in self._captions.of(raw) for text in texts]
        caption = self._captions.draw(raw, seed)
        return [] if caption is None else [caption]


def caption_id(caption: str) -> int:
    """A hash of a caption, 0 or more, that is the same in every process."""
    digest = hashlib.blake2b(caption.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class BatchInTheMaking:
    """Takes samples one by one and makes a batch of them, in their order."""

    def __init__(self, tokenize: Tokenizer, size: tuple[int, int]) -> None:
        self._tokenize = tokenize
        self._pictures = Pictures(size)
        self._image_sample: list[int] = []
        self._text_sample: list[int] = []
        self._captions: list[str] = []
        self._caption_ids: list[int] = []
        self._keys: list[str] = []
        self._repeated = 0

    def add(self, sample: Sample) -> None:
        """Take the next sample."""
        row = len(self._keys)
        self._keys.append(sample.key)
        if sample.pixels is not None:
            self._pictures.add(sample.pixels)
            self._image_sample.append(row)
        self._captions += sample.captions
        self._text_sample += [row] * len(sample.captions)
        self._caption_ids.append(caption_id(sample.captions[0]) if sample.captions else -1)
        self._repeated += sample.again

    def batch(self, state: dict[Any, Any], skipped: Counter[str]) -> Batch:
        """The batch of all that were taken."""
        # a tokenizer knows its width only from a text: an empty batch of texts is a slice of one
        tokens = self._tokenize(self._captions or [""])[: len(self._captions)]
        return Batch(
            images=self._pictures.stacked(),
            texts=tokens.long(),
            image_sample=torch.tensor(self._image_sample, dtype=torch.int64),
            text_sample=torch.tensor(self._text_sample, dtype=torch.int64),
            caption_id=torch.tensor(self._caption_ids, dtype=torch.int64),
            keys=self._keys,
            state=state,
            skipped=dict(skipped),
            repeated=self._repeated,
        )
