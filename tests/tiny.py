"""Tiny models and batches that tests share."""

from __future__ import annotations

from typing import Any

import torch

from shardclip.models import factory
from shardclip.models.factory import ModelSpec
from shardclip.training.data.batch import Batch

VISION = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16}
TEXT = {"context_length": 16, "vocab_size": 128, "width": 64, "heads": 2, "layers": 2}
DECODER = {"context_length": 16, "vocab_size": 128, "width": 64, "heads": 2, "layers": 2}
PREPROCESS = {"size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}


def spec(kind: str = "clip", **vision: Any) -> ModelSpec:
    """A specification with two blocks of width 64 per tower; `kind` is clip, siglip, coca, timm or resnet."""
    model_cfg: dict[str, Any] = {"embed_dim": 32, "vision_cfg": {**VISION, **vision}, "text_cfg": dict(TEXT)}
    if kind == "siglip":
        model_cfg |= {"init_logit_scale": 2.302585, "init_logit_bias": -10.0}
    elif kind == "coca":
        model_cfg["vision_cfg"] |= {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
        model_cfg["text_cfg"] |= {"embed_cls": True, "output_tokens": True}
        model_cfg |= {"embed_dim": 64, "multimodal_cfg": dict(DECODER), "custom_text": True}
    elif kind == "timm":
        model_cfg["vision_cfg"] = {"timm_model_name": "test_vit", "timm_pool": "avg", "image_size": 32}
    elif kind == "resnet":
        model_cfg["vision_cfg"] = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    return ModelSpec(kind, model_cfg, dict(PREPROCESS))


def batch(images: list[int], texts: list[int], samples: int, seed: int = 0, first: int = 0) -> Batch:
    """A batch whose samples `images` have an image and `texts` a text; a sample's number makes its content.

    `first` is added to the number: it lets ranks hold different samples.
    """

    def generator(sample: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * seed + first + sample)

    pixels = [torch.randint(0, 256, (3, 32, 32), generator=generator(s), dtype=torch.uint8) for s in images]
    tokens = [_caption(generator(s)) for s in texts]
    caption_id = torch.full((samples,), -1)
    caption_id[texts] = torch.tensor([first + s for s in texts], dtype=torch.int64)
    return Batch(
        images=torch.stack(pixels) if pixels else torch.zeros(0, 3, 32, 32, dtype=torch.uint8),
        texts=torch.stack(tokens) if tokens else torch.zeros(0, 16, dtype=torch.int64),
        image_sample=torch.tensor(images, dtype=torch.int64),
        text_sample=torch.tensor(texts, dtype=torch.int64),
        caption_id=caption_id,
        keys=[f"sample-{first + s}" for s in range(samples)],
    )


def _caption(generator: torch.Generator) -> torch.Tensor:
    """Start mark 126, 3 to 12 words, end mark 127, padding 0."""
    words = int(torch.randint(3, 13, (1,), generator=generator))
    tokens = torch.zeros(16, dtype=torch.int64)
    tokens[0] = 126
    tokens[1 : words + 1] = torch.randint(1, 126, (words,), generator=generator)
    tokens[words + 1] = 127
    return tokens


def blank_text() -> torch.Tensor:
    """The empty caption."""
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    tokens[0, :2] = torch.tensor([126, 127])
    return tokens


def build(kind: str = "clip", seed: int = 0, **vision: Any):  # type: ignore[no-untyped-def]
    """A plain tiny model with random weights."""
    return factory.build(spec(kind, **vision), seed=seed)
