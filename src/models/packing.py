"""Captions packed into full rows, so that a text tower computes their real tokens and hardly anything else.

In a causal tower that takes its features at the end mark, nothing that counts sees what comes after it (see
`padding.py`). So captions stand side by side in a row without their padding; each token sees its own caption
alone, and has its place in it. Features and gradients are those of one caption a row. Every block is called
once a pass, on [R, W, width]: gathers, recompute, compile and names stay as they are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardclip.models.padding import sees_padding

_MULTIPLE = 8
"""Rows are multiples of this: attention kernels want aligned masks."""
_NO_CAPTION = -1


class PackedTexts(NamedTuple):
    """T captions in R rows of W tokens, int64. (A tuple, so that DDP and FSDP find the tensors in it.)"""

    tokens: Tensor
    """[R, W] token ids."""
    places: Tensor
    """[R, W] the place of each token in its caption, from 0."""
    captions: Tensor
    """[R, W] the caption (0 .. T-1) that each token belongs to, -1 for the rest of a row."""
    ends: Tensor
    """[T] where the end mark of each caption is among the R * W tokens."""


@dataclass(frozen=True)
class EndMark:
    """Where a tower takes a caption's features: at the first token that is `id`, or at the first largest."""

    id: int | None = None

    def lengths(self, tokens: Tensor) -> Tensor:
        """[T] int64: tokens of each caption [T, L] up to its end mark, and with it."""
        marks = tokens if self.id is None else (tokens == self.id).int()
        return marks.argmax(dim=1) + 1


def end_mark(tower: nn.Module) -> EndMark | None:
    """The end mark of a tower that `PackedTexts` are exact for; None for every other."""
    if sees_padding(tower) or tower.output_tokens:
        return None
    return EndMark(tower.eos_id if tower.pool_type == "eos" else None)  # type: ignore[arg-type]


def pack(texts: Tensor, mark: EndMark) -> PackedTexts:
    """Lay captions [T, L] side by side, without what comes after their end marks.

    A row is as long as the context, or as all captions together if that is less. Reads values: call it on
    the CPU.
    """
    lengths = mark.lengths(texts)
    width = _rounded(min(texts.shape[1], int(lengths.sum())))
    row_of, start_of = fit(lengths.tolist(), width)
    rows = max(row_of, default=0) + 1
    first = torch.tensor(row_of) * width + torch.tensor(start_of)
    caption = torch.arange(len(texts)).repeat_interleave(lengths)
    place = torch.arange(len(caption)) - (lengths.cumsum(0) - lengths)[caption]
    spots = first[caption] + place

    def laid(values: Tensor, rest: int) -> Tensor:
        return torch.full((rows * width,), rest).scatter_(0, spots, values).view(rows, width)

    return PackedTexts(
        tokens=laid(texts[caption, place], 0),
        places=laid(place, 0),
        captions=laid(caption, _NO_CAPTION),
        ends=first + lengths - 1,
    )


def fit(lengths: list[int], width: int) -> tuple[list[int], list[int]]:
    """Row and first place in it of each piece: longest first, each into the fullest row that takes it."""
    with_room: list[list[int]] = [[] for _ in range(width + 1)]
    row_of, start_of, rows = [0] * len(lengths), [0] * len(lengths), 0
    for piece in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[piece]
        room = next((room for room in range(length, width + 1) if with_room[room]), None)
        if room is None:
            row, room, rows = rows, width, rows + 1
        else:
            row = with_room[room].pop()
        row_of[piece], start_of[piece] = row, width - room
        with_room[room - length].append(row)
    return row_of, start_of


def _rounded(length: int) -> int:
    return -(-length // _MULTIPLE) * _MULTIPLE


def take_packed(tower: nn.Module) -> None:
    """Let a tower's `forward` take `PackedTexts` as well as token ids.

    On the instance, so that neither its class nor a parameter's name changes.
    """
    tower.forward = functools.partial(_forward, tower)


def _forward(tower: Any, texts: Tensor | PackedTexts) -> Tensor:
    """Features [T, D], as open_clip's `TextTransformer` has them."""
    if isinstance(texts, Tensor):
        return type(tower).forward(tower, texts)
    dtype = tower.transformer.get_cast_dtype()
    words = tower.token_embedding(texts.tokens).to(dtype)
    x = words + F.embedding(texts.places, tower.positional_embedding).to(dtype)
    x = tower.transformer(x, attn_mask=_mask(texts.captions, tower.heads, dtype))
    features = tower.ln_final(x.flatten(0, 1).index_select(0, texts.ends))
    projection = tower.text_projection
    if projection is None:
        return features
    return projection(features) if isinstance(projection, nn.Linear) else features @ projection


def _mask(captions: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[R * heads, W, W], added to attention's logits: 0 for the own caption up to itself, else -inf.

    The rest of a row sees itself, so that its softmax is finite; nothing takes features from it.
    """
    seen = (captions[:, :, None] == captions[:, None, :]).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return mask.repeat_interleave(heads, dim=0)
