"""Short texts without the padding that the text tower cannot see: a prompt is 10 tokens, a context 77."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

_MULTIPLE = 8
"""Lengths are multiples of this: a compiled tower meets few shapes."""


@contextmanager
def without_padding(tower: nn.Module, tokens: Tensor) -> Iterator[Tensor]:
    """The token ids [T, L] without the last columns, as far as they pad every row and make no difference.

    They make none in open_clip's own text tower when it is causal and takes its features at the end-of-text
    token: no token sees those after it. Towers of other kinds get all columns. The tower is to be called
    inside the context, where its causal mask has the size of the shorter texts.
    """
    if not _is_causal(tower):
        yield tokens
        return
    used = (tokens != 0).any(dim=0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    tokens = tokens[:, : -(-length // _MULTIPLE) * _MULTIPLE]
    whole = tower.attn_mask
    assert isinstance(whole, Tensor)
    tower.attn_mask = whole[: tokens.shape[1], : tokens.shape[1]]
    try:
        yield tokens
    finally:
        tower.attn_mask = whole


def _is_causal(tower: nn.Module) -> bool:
    from open_clip.transformer import TextTransformer

    return (
        isinstance(tower, TextTransformer)
        and tower.attn_mask is not None
        and tower.cls_emb is None
        and tower.pool_type in ("argmax", "eos")
        and tower.pad_id == 0
    )
