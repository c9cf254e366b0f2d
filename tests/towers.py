"""Every kind of tower that open_clip builds, tiny, for tests of what is decided by a parameter's name."""

import json
import tempfile
from functools import cache
from pathlib import Path

import tiny
import torch
from torch import Tensor

from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.factory import ModelSpec, build

KINDS = ("native", "resnet", "timm", "bert", "t5", "coca")
"""Native towers, ResNet with a native text tower, timm, two of Hugging Face's, and CoCa."""


def model(kind: str) -> DualEncoder:
    """The tiny model of a kind, with the same random weights each time."""
    return build(_spec(kind), seed=0)


def inputs(kind: str, samples: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random pixels [samples, 3, H, W] and token ids [samples, 16] for the model of a kind."""
    generator = torch.Generator().manual_seed(seed)
    side = _spec(kind).model_cfg["vision_cfg"]["image_size"]
    images = torch.randn(samples, 3, side, side, generator=generator)
    return images, torch.randint(3, 100, (samples, 16), generator=generator)


def _spec(kind: str) -> ModelSpec:
    spec = tiny.spec(kind if kind in ("resnet", "coca") else "clip")
    if kind == "timm":
        # timm's smallest transformer is made for pictures of 160 pixels.
        spec.model_cfg["vision_cfg"] = {"timm_model_name": "test_vit", "timm_pool": "", "image_size": 160}
    if kind in ("bert", "t5"):
        spec.model_cfg["text_cfg"] = {
            "hf_model_name": _hugging_face_folder(kind),
            "hf_model_pretrained": False,
            "hf_pooler_type": "cls_pooler" if kind == "bert" else "mean_pooler",
            "hf_proj_type": "linear",
            "vocab_size": 128,
        }
    return spec


@cache
def _hugging_face_folder(kind: str) -> str:
    bert = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
    }
    t5 = {"model_type": "mt5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    config = {"vocab_size": 128, "pad_token_id": 0, **(bert if kind == "bert" else t5)}
    folder = tempfile.mkdtemp(prefix=f"tiny-{kind}-")
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
