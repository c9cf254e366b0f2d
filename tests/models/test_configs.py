"""Configurations that ship, and open_clip's mixed pairs: they resolve, and are as big as they say."""

import json

import pytest
from open_clip.model import CLIPTextCfg, CLIPVisionCfg

from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.factory import CONFIGS, ModelConfig
from shardclip.training.units import find_blocks, towers


def _sizes(name: str) -> list[int]:
    """Parameters of the towers, then of the whole model."""
    model = factory.build_meta(factory.resolve(ModelConfig(model=name)))
    modules = [tower for _, tower in towers(model)]
    return [sum(p.numel() for p in module.parameters()) for module in (*modules, model)]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_file_has_open_clips_form(path):
    values = json.loads(path.read_text())
    assert set(values) == {"embed_dim", "vision_cfg", "text_cfg"}
    vision, text = CLIPVisionCfg(**values["vision_cfg"]), CLIPTextCfg(**values["text_cfg"])
    assert vision.width % vision.head_width == 0
    assert text.hf_model_name or text.width % text.heads == 0


def test_the_shipped_names():
    assert {path.stem for path in CONFIGS.glob("*.json")} == {"ViT-G-14", "ViT-X-14", "mt5-xxl-ViT-G-14"}


def test_g14_is_open_clips_bigg():
    assert _sizes("ViT-G-14") == [1_844_907_264, 694_659_840, 2_539_567_105]
    shipped, theirs = (
        factory.resolve(ModelConfig(model=name)).model_cfg for name in ("ViT-G-14", "ViT-bigG-14")
    )
    assert shipped == theirs


def test_x14_holds_15b_and_5b():
    assert _sizes("ViT-X-14") == [14_290_449_408, 4_692_907_008, 18_983_356_417]


def test_mt5_xxl_takes_the_image_tower_of_g14():
    mixed = factory.resolve(ModelConfig(model="mt5-xxl-ViT-G-14")).model_cfg
    plain = factory.resolve(ModelConfig(model="ViT-G-14")).model_cfg
    assert mixed["vision_cfg"] == plain["vision_cfg"]
    assert mixed["text_cfg"]["hf_model_name"] == "google/mt5-xxl"


@pytest.mark.parametrize(
    ("name", "millions", "blocks"),
    [
        ("convnext_base_w", 179.39, ("ConvNeXtBlock", "ResidualAttentionBlock")),
        ("ViT-B-16-SigLIP", 203.16, ("Block", "ResidualAttentionBlock")),
        ("RN50", 102.01, ("Bottleneck", "ResidualAttentionBlock")),
    ],
)
def test_a_mixed_pair_is_built_and_its_blocks_are_found(name, millions, blocks):
    model = factory.build_meta(factory.resolve(ModelConfig(model=name)))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions
    assert tuple(type(find_blocks(tower)[0][1]).__name__ for _, tower in towers(model)) == blocks


@pytest.mark.parametrize("name", ["roberta-ViT-B-32", "xlm-roberta-large-ViT-H-14", "mt5-xl-ViT-H-14"])
def test_a_hugging_face_pair_resolves_without_its_hub(name):
    spec = factory.resolve(ModelConfig(model=name))
    assert spec.model_cfg["text_cfg"]["hf_model_name"]


_HUB = {
    "google/mt5-xxl": {
        "model_type": "mt5", "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24,
        "vocab_size": 250112, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
    "roberta-base": {
        "model_type": "roberta", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
        "num_hidden_layers": 12, "max_position_embeddings": 514, "type_vocab_size": 1, "vocab_size": 50265,
        "pad_token_id": 1,
    },
}  # fmt: skip
"""The hub's `config.json` of these towers, the lines that shape them."""


@pytest.mark.parametrize(
    ("name", "tower", "blocks", "text_millions"),
    [
        ("mt5-xxl-ViT-G-14", "google/mt5-xxl", ("ResidualAttentionBlock", "MT5Block", 24), 5660.0),
        ("roberta-ViT-B-32", "roberta-base", ("ResidualAttentionBlock", "RobertaLayer", 12), 124.0),
    ],
)
def test_a_pair_with_a_hugging_face_tower_is_built_in_full_size(name, tower, blocks, text_millions, tmp_path):
    spec = factory.resolve(ModelConfig(model=name))
    (tmp_path / "config.json").write_text(json.dumps(_HUB[tower]))
    assert spec.model_cfg["text_cfg"]["hf_model_name"] == tower
    spec.model_cfg["text_cfg"]["hf_model_name"] = str(tmp_path)
    model = factory.build_meta(spec)
    found = {of: find_blocks(module) for of, module in towers(model)}
    kinds = (type(found["visual"][0][1]).__name__, type(found["text"][0][1]).__name__, len(found["text"]))
    assert kinds == blocks
    size = sum(p.numel() for p in model.text.parameters()) / 1e6
    assert size == pytest.approx(text_millions, rel=0.02)


def test_patch_dropout_is_a_flag_of_a_shipped_model():
    spec = factory.resolve(ModelConfig(model="ViT-X-14", force_patch_dropout=0.5))
    assert spec.model_cfg["vision_cfg"]["patch_dropout"] == 0.5


def test_a_wrong_name_names_the_nearest_shipped_one():
    with pytest.raises(UserError, match="ViT-X-14"):
        factory.resolve(ModelConfig(model="ViT-X14"))
