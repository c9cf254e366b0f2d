"""Short captions without the padding that a text tower cannot see: a caption is 20 tokens, a context 77.

In a causal tower that takes its features at the end mark, no token sees those after it. Cut to its longest
caption, a batch has the same features and gradients. (Where nothing but the features is wanted of the tower,
`packing.py` leaves out the padding of the other captions, too.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

_MULTIPLE = 8
"""Lengths are multiples of this: a compiled tower meets few shapes."""


def sees_padding(tower: nn.Module) -> bool:
    """Whether padding may make a difference to a text tower: it cannot in open_clip's own, if that is causal
    and pools at the end mark. Wrapping by FSDP does not change the answer."""
    from open_clip.transformer import TextTransformer

    return not (
        isinstance(tower, TextTransformer)
        and tower.attn_mask is not None
        and tower.cls_emb is None
        and tower.pool_type in ("argmax", "eos")
        and tower.pad_id == 0
    )


def without_padding(tokens: Tensor) -> Tensor:
    """The token ids [T, L] without the last columns, as far as they are padding (0) in every row.

    What is left is a multiple of 8 where there are so many. Reads values: call it on the CPU.
    """
    used = (tokens != 0).any(dim=0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    return tokens[:, : -(-length // _MULTIPLE) * _MULTIPLE]


@contextmanager
def mask_of_length(tower: nn.Module, length: int) -> Iterator[None]:
    """Inside, a tower that does not see padding takes texts of `length` tokens.

    (open_clip 3.3.0 does not cut its causal mask to the length of the text.)
    """
    whole = getattr(tower, "attn_mask", None)
    if not isinstance(whole, Tensor) or len(whole) == length:
        yield
        return
    tower.attn_mask = whole[:length, :length]
    try:
        yield
    finally:
        tower.attn_mask = whole
