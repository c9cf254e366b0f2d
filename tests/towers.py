"""Every kind of tower that open_clip builds, tiny, and the configurations of real models, shrunk."""

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.factory import ModelConfig, ModelSpec, build, resolve

KINDS = ("native", "resnet", "timm", "bert", "t5", "coca")
"""Native towers, ResNet with a native text tower, timm, two of Hugging Face's, and CoCa."""
SHIPPED = (
    "ViT-G-14",
    "ViT-X-14",
    "mt5-xxl-ViT-G-14",
    "convnext_base_w",
    "ViT-B-16-SigLIP",
    "roberta-ViT-B-32",
    "RN50",
    "coca_ViT-B-32",
)
"""Configurations that a run can name: ours, and of open_clip's timm, RoBERTa, ResNet and CoCa."""
_TIMM_TINY = {"convnext_base": "test_convnext", "vit_base_patch16_siglip_224": "test_vit"}


def model(kind: str) -> DualEncoder:
    """The tiny model of a kind, with the same random weights each time."""
    return build(_spec(kind), seed=0)


def inputs(kind: str, samples: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random pixels [samples, 3, H, W] and token ids [samples, 16] for the model of a kind."""
    generator = torch.Generator().manual_seed(seed)
    side = _spec(kind).model_cfg["vision_cfg"]["image_size"]
    images = torch.randn(samples, 3, side, side, generator=generator)
    return images, torch.randint(3, 100, (samples, 16), generator=generator)


def shrunk(name: str) -> ModelSpec:
    """The configuration of that name with narrow, shallow towers of the same make; input as in `tiny`.

    `rotary` is a timm tower with rotary tables, at its own size: it is built, not run.
    """
    if name == "rotary":
        vision = {"timm_model_name": "eva02_tiny_patch14_224", "timm_pool": "avg", "image_size": 224}
        return ModelSpec(name, {**tiny.spec().model_cfg, "vision_cfg": vision}, dict(tiny.PREPROCESS))
    full = resolve(ModelConfig(model=name))
    model_cfg = copy.deepcopy(full.model_cfg)
    vision, text = model_cfg["vision_cfg"], model_cfg["text_cfg"]
    # Without a projection the features are as wide as timm's tower.
    model_cfg["embed_dim"] = 64 if vision.get("timm_proj") == "none" else 32
    vision["image_size"] = 32
    if "timm_model_name" in vision:
        vision |= {"timm_model_name": _TIMM_TINY[vision["timm_model_name"]], "timm_drop_path": None}
    elif isinstance(vision["layers"], list):
        vision |= {"layers": [1, 1, 1, 1], "width": 8}
    else:
        vision |= {"layers": 2, "width": 32, "head_width": 16, "patch_size": 16}
    if "hf_model_name" in text:
        make = "t5" if "mt5" in text["hf_model_name"] else "roberta"
        text |= {"hf_model_name": _hugging_face_folder(make), "hf_model_pretrained": False, "vocab_size": 128}
    for part in (text, model_cfg.get("multimodal_cfg", {})):
        if "width" in part:
            part |= {"context_length": 16, "vocab_size": 128, "width": 32, "heads": 2, "layers": 2}
    for part in (vision, model_cfg.get("multimodal_cfg", {})):
        if "attn_pooler_heads" in part:
            part["attn_pooler_heads"] = 2
    return ModelSpec(name, model_cfg, dict(tiny.PREPROCESS))


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


_BERT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
_HUGGING_FACE: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **_BERT},
    "roberta": {"model_type": "roberta", **_BERT},
    "t5": {
        "model_type": "mt5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2,
        "dropout_rate": 0.0,
    },
}  # fmt: skip


@cache
def _hugging_face_folder(make: str) -> str:
    config = {"vocab_size": 128, "pad_token_id": 0, **_HUGGING_FACE[make]}
    folder = tempfile.mkdtemp(prefix=f"tiny-{make}-")
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
