"""The one module that is trained, and the one door to its parameters: `DualEncoder.forward`."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardclip.models.packing import PackedTexts, end_mark, pack, take_packed
from shardclip.models.padding import mask_of_length, sees_padding, without_padding
from shardclip.models.transfer import sent


class Encoded(NamedTuple):
    """What one call of `DualEncoder` returns; a side that was not given is None."""

    image_features: Tensor | None
    """[I, D], fp32, L2-normalised."""
    text_features: Tensor | None
    """[T, D], fp32, L2-normalised."""
    logit_scale: Tensor
    """[], fp32: the factor itself (the exponential of the parameter), with graph."""
    logit_bias: Tensor | None
    """[], fp32, with graph; None for a model without one."""
    caption_logits: Tensor | None = None
    """[P, L - 1, V]: next-token logits of each asked-for pair; None unless `caption_pairs` was given."""


class DualEncoder(nn.Module):
    """An image tower, a text tower, a temperature and, for captioning models, a text decoder.

    The attribute names are those of `open_clip.CustomTextCLIP` and `open_clip.CoCa`, so state dicts have
    their keys. `logit_scale` and `logit_bias` are 0-D and fp32; no engine shards or casts them.
    """

    def __init__(
        self,
        visual: nn.Module,
        text: nn.Module,
        logit_scale: float,
        logit_bias: float | None = None,
        text_decoder: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.compute_dtype: torch.dtype | None = None
        """What the towers autocast to; None leaves them as they are (fp32, or as FSDP casts them)."""
        self.visual = visual
        self.text = text
        self.sees_padding = sees_padding(text)
        self.end_mark = end_mark(text)
        """What captions are packed by; None for a text tower that takes one caption a row."""
        if self.end_mark is not None:
            take_packed(text)
        if text_decoder is not None:
            self.text_decoder = text_decoder
        self.logit_scale = nn.Parameter(torch.tensor(logit_scale, dtype=torch.float32))
        self.logit_bias = (
            None if logit_bias is None else nn.Parameter(torch.tensor(logit_bias, dtype=torch.float32))
        )

    def text_input(self, tokens: Tensor, device: torch.device) -> Tensor | PackedTexts:
        """Token ids [T, L] as what `forward` computes least for, to the same features.

        Args:
            tokens: on the CPU, where their values are read.
            device: where `forward` takes them; the host does not wait for the copy.
        """
        if self.sees_padding:
            return sent(tokens, device)
        cut = without_padding(tokens)
        if self.end_mark is not None:
            packed = pack(tokens, self.end_mark)
            # Where every caption is long, a row each, with one mask for all, takes no more and less memory.
            if packed.tokens.numel() < cut.numel():
                return PackedTexts(*(sent(part, device) for part in packed))
        return sent(cut, device)

    def forward(
        self,
        image: Tensor | None = None,
        text: Tensor | PackedTexts | None = None,
        *,
        caption_pairs: tuple[Tensor, Tensor] | None = None,
        clamp_scale: tuple[float, float] | None = None,
    ) -> Encoded:
        """Encode an image batch, a text batch, both, or neither (to read or clamp the scale).

        Args:
            image: normalised pixels [I, 3, H, W], float.
            text: token ids [T, L], int64, or what `text_input` made of them.
            caption_pairs: rows of `image` and rows of `text` ([P] int64 each) to decode captions for.
            clamp_scale: bounds that the *logarithm* of the scale is clamped to, in place, before it is read.
        """
        if clamp_scale is not None:
            with torch.no_grad():
                self.logit_scale.clamp_(*clamp_scale)
        caption_logits = None
        with self._computing():
            image_features, image_tokens = _encode(self.visual, image)
            with (
                mask_of_length(self.text, text.shape[1])
                if isinstance(text, Tensor) and not self.sees_padding
                else nullcontext()
            ):
                text_features, text_tokens = _encode(self.text, text)
            if caption_pairs is not None:
                assert image_tokens is not None and text_tokens is not None
                image_rows, text_rows = caption_pairs
                caption_logits = self.text_decoder(image_tokens[image_rows], text_tokens[text_rows, :-1])
        return Encoded(
            image_features=None if image_features is None else _normalise(image_features),
            text_features=None if text_features is None else _normalise(text_features),
            logit_scale=self.logit_scale.exp(),
            logit_bias=self.logit_bias,
            caption_logits=caption_logits,
        )

    def _computing(self) -> AbstractContextManager[object]:
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(self.logit_scale.device.type, self.compute_dtype)


def _encode(tower: nn.Module, inputs: Tensor | PackedTexts | None) -> tuple[Tensor | None, Tensor | None]:
    """Features, and the token embeddings that captioning towers return beside them."""
    if inputs is None:
        return None, None
    outputs = tower(inputs)
    return outputs if isinstance(outputs, tuple) else (outputs, None)


def _normalise(features: Tensor) -> Tensor:
    # In fp32 whatever the tower computes in: bf16 unit vectors are off by up to 4e-3 in length.
    return F.normalize(features.float(), dim=-1)
