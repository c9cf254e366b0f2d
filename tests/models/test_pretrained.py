"""What a model starts from: whole weights, those of a tower, or random ones; and its tokenizer."""

import json
import logging
from pathlib import Path
from typing import Any

import open_clip
import pytest
import tiny
import torch
from torch import Tensor, nn

from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.factory import ModelConfig, ModelSpec
from shardclip.models.pretrained import CONFIG_NAME
from shardclip.training.evaluation.loading import load, locate


def _config(folder: Path, spec: ModelSpec) -> None:
    folder.mkdir(exist_ok=True)
    content = {"model_cfg": spec.model_cfg, "preprocess_cfg": spec.preprocess_cfg}
    (folder / CONFIG_NAME).write_text(json.dumps(content))


def _same(one: nn.Module, other: dict[str, Tensor]) -> bool:
    own = one.state_dict()
    return own.keys() == other.keys() and all(torch.equal(own[name], value) for name, value in other.items())


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return factory.build(tiny.spec(), seed=7).state_dict()


@pytest.fixture
def folder(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    folder = tmp_path / "model"
    _config(folder, tiny.spec())
    torch.save(weights, folder / "open_clip_pytorch_model.bin")
    return folder


def _built(config: ModelConfig) -> nn.Module:
    return factory.build(factory.resolve(config), config, seed=0)


def test_a_folder_means_its_weights_as_in_open_clip(
    folder: Path, weights: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = ModelConfig(model=f"local-dir:{folder}")
    model = _built(config)
    assert _same(model, weights)
    assert f"starting weights: {folder / 'open_clip_pytorch_model.bin'}" in caplog.messages
    assert _same(load(locate(config.model, ModelConfig())), weights)
    theirs = open_clip.create_model(config.model, force_custom_text=True)
    assert torch.equal(theirs.state_dict()["visual.proj"], weights["visual.proj"])


def test_a_folder_without_weights_starts_from_random_ones_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _config(tmp_path / "model", tiny.spec())
    model = _built(ModelConfig(model=f"local-dir:{tmp_path / 'model'}"))
    assert _same(model, factory.build(tiny.spec(), seed=0).state_dict())
    assert "starting weights: image tower random, text tower random" in caplog.messages
    with pytest.raises(UserError, match="no file of weights beside"):
        locate(str(tmp_path / "model"), ModelConfig())


def test_a_damaged_file_of_weights_is_a_message(folder: Path) -> None:
    (folder / "open_clip_model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match=r"open_clip_model\.safetensors does not fit"):
        _built(ModelConfig(model=f"local-dir:{folder}"))


def test_several_files_of_weights_are_refused_unless_one_has_open_clips_name(folder: Path) -> None:
    config = ModelConfig(model=f"local-dir:{folder}")
    (folder / "other.pt").write_bytes(b"")
    _built(config)
    (folder / "open_clip_pytorch_model.bin").rename(folder / "one.pt")
    with pytest.raises(UserError, match=r"there are: one\.pt, other\.pt"):
        _built(config)


def test_the_hub_gives_architecture_pixels_and_weights(
    folder: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, filename: str | None = None, cache_dir: str | None = None) -> str:
        assert (name, cache_dir) == ("me/tiny", "kept")
        return str(folder / (filename or "open_clip_pytorch_model.bin"))

    monkeypatch.setattr(open_clip.pretrained, "download_pretrained_from_hf", download)
    config = ModelConfig(model="hf-hub:me/tiny", cache_dir="kept")
    spec = factory.resolve(config)
    assert (spec.model_cfg, spec.preprocess_cfg["mean"]) == (tiny.spec().model_cfg, tiny.PREPROCESS["mean"])
    assert _same(factory.build(spec, config, seed=0), weights)
    assert _same(load(locate("hf-hub:me/tiny", ModelConfig(cache_dir="kept"))), weights)


def test_a_repository_that_cannot_be_reached_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise FileNotFoundError("no network")

    monkeypatch.setattr(open_clip.pretrained, "download_pretrained_from_hf", fail)
    with pytest.raises(UserError, match=rf"hf-hub:me/tiny: {CONFIG_NAME} cannot be had: no network"):
        factory.resolve(ModelConfig(model="hf-hub:me/tiny"))


def test_a_file_for_a_tower_is_not_lost_in_the_weights_of_a_folder(
    tmp_path: Path, folder: Path, weights: dict[str, Tensor]
) -> None:
    other = factory.build(tiny.spec(), seed=8).visual.state_dict()
    torch.save(other, tmp_path / "tower.pt")
    config = ModelConfig(model=f"local-dir:{folder}", pretrained_image_path=str(tmp_path / "tower.pt"))
    assert _same(_built(config).visual, other)


# -- Hugging Face text towers


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A BERT with weights and a tokenizer, as a repository on the hub holds them."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    folder = tmp_path / "bert"
    torch.manual_seed(5)
    BertModel(BertConfig(vocab_size=16, **sizes), add_pooling_layer=False).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "photo", "of", "cat", "##s"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def _with_bert(bert: Path) -> ModelSpec:
    spec = tiny.spec()
    spec.model_cfg["text_cfg"] = {
        "hf_model_name": str(bert),
        "hf_tokenizer_name": str(bert),
        "hf_pooler_type": "cls_pooler",
        "hf_proj_type": "linear",
        "context_length": 8,
        "vocab_size": 16,
    }
    return spec


def test_a_text_tower_starts_from_its_own_weights_as_in_open_clip(
    tmp_path: Path, bert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import BertModel

    caplog.set_level(logging.INFO)
    spec = _with_bert(bert)
    _config(tmp_path / "model", spec)
    config = ModelConfig(model=f"local-dir:{tmp_path / 'model'}")
    own = BertModel.from_pretrained(bert, add_pooling_layer=False).state_dict()
    name = "encoder.layer.0.output.dense.weight"
    model = factory.build(factory.resolve(config), config, seed=0)
    assert torch.equal(model.text.transformer.state_dict()[name], own[name])
    assert f"starting weights: image tower random, text tower {bert}'s own" in caplog.messages
    random = factory.build(spec, ModelConfig(pretrained_text=False), seed=0)
    assert not torch.equal(random.text.transformer.state_dict()[name], own[name])
    # A model whose weights come later is built without them.
    assert _same(random, factory.build(spec, seed=0).state_dict())


def test_a_text_towers_weights_that_cannot_be_had_are_a_message(bert: Path) -> None:
    for file in bert.glob("model*"):
        file.unlink()
    with pytest.raises(UserError, match="--no-pretrained-text"):
        factory.build(_with_bert(bert), ModelConfig())


def test_a_tokenizer_is_taken_by_its_name(bert: Path) -> None:
    tokenize = factory.tokenizer(_with_bert(bert))
    assert tokenize(["a photo of cats"]).tolist() == [[2, 5, 6, 7, 8, 9, 3, 0]]


def test_a_tokenizer_that_cannot_be_had_is_named(tmp_path: Path, bert: Path) -> None:
    spec = _with_bert(bert)
    spec.model_cfg["text_cfg"]["hf_tokenizer_name"] = str(tmp_path / "gone")
    with pytest.raises(UserError, match="gone"):
        factory.tokenizer(spec)


def test_a_tower_that_is_stored_in_half_precision_is_trained_from_fp32(bert: Path) -> None:
    from transformers import BertModel

    BertModel.from_pretrained(bert, add_pooling_layer=False).half().save_pretrained(bert)
    spec = _with_bert(bert)
    for model in (factory.build(spec, ModelConfig()), factory.build_meta(spec)):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# -- the activation


@pytest.mark.parametrize(("model", "warned"), [("ViT-B-32", True), ("ViT-B-32-quickgelu", False)])
def test_weights_of_another_gelu_are_warned_of(
    model: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(open_clip, "download_pretrained", fail)
    config = ModelConfig(model=model, pretrained="openai")
    with pytest.raises(UserError, match="no network"):
        factory.build(factory.resolve(config), config)
    assert any("--force-quick-gelu" in message for message in caplog.messages) == warned
