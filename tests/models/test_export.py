"""What goes in comes out: our files open in open_clip to the same features, and open_clip's open here."""

import json
import subprocess
import sys
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor, nn

from shardclip import cli
from shardclip.errors import UserError
from shardclip.models.export import WEIGHTS_NAME, UnreadTensor, write_model, write_safetensors
from shardclip.models.factory import ModelConfig, ModelSpec, build
from shardclip.models.weights import from_open_clip, read_file, read_weights, to_open_clip
from shardclip.training import distributed
from shardclip.training.checkpoint import CheckpointConfig, Checkpoints, TrainState
from shardclip.training.checkpoint.export import export
from shardclip.training.evaluation.loading import load, locate

_VISION = {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
_TEXT = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
_TIMM = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear", "image_size": 160}
_POOLER = {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 4}
_COCA_TEXT = {"embed_cls": True, "output_tokens": True}
_DECODER = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "CLIP": {"embed_dim": 16, "vision_cfg": _VISION, "text_cfg": _TEXT},
    "CustomTextCLIP": {"embed_dim": 16, "custom_text": True, "vision_cfg": _VISION, "text_cfg": _TEXT},
    "timm": {
        "embed_dim": 16,
        "custom_text": True,
        "init_logit_bias": -10,
        "vision_cfg": _TIMM,
        "text_cfg": _TEXT | {"proj_bias": True, "pool_type": "last", "no_causal_mask": True},
    },
    "CoCa": {
        "embed_dim": 32,
        "custom_text": True,
        "multimodal_cfg": _DECODER,
        "vision_cfg": _VISION | _POOLER | {"output_tokens": True},
        "text_cfg": _TEXT | _COCA_TEXT,
    },
}
PREPROCESS = {"size": 16, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "interpolation": "bilinear"}


@pytest.fixture(params=[*CONFIGS, "hf"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    if request.param == "hf":
        return ModelSpec("hf", _hf_config(tmp_path / "tower"), PREPROCESS)
    return ModelSpec(request.param, CONFIGS[request.param], PREPROCESS)


def _hf_config(folder: Path) -> dict[str, Any]:
    """A BERT described by a folder, so that nothing is downloaded."""
    from transformers import BertConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertConfig(vocab_size=64, **sizes).save_pretrained(folder)
    text = {"hf_model_name": str(folder), "hf_proj_type": "mlp", "hf_pooler_type": "mean_pooler"}
    return {
        "embed_dim": 16,
        "vision_cfg": _VISION,
        "text_cfg": text | {"context_length": 8, "vocab_size": 64},
    }


def _trained(spec: ModelSpec) -> nn.Module:
    """A model whose scale and bias are no longer those that open_clip starts with."""
    model = build(spec, seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def _inputs(size: int, length: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(1, 60, (3, length))
    text[:, -1] = 63
    return torch.randn(3, 3, size, size), text


def _same_features(ours: nn.Module, theirs: nn.Module, length: int = 8) -> None:
    image, text = _inputs(theirs.visual.image_size[0], length)
    with torch.no_grad():
        encoded = ours.eval()(image, text)
        theirs.eval()
        pairs = (
            (theirs.encode_image(image, normalize=True), encoded.image_features),
            (theirs.encode_text(text, normalize=True), encoded.text_features),
        )
        for their_features, our_features in pairs:
            torch.testing.assert_close(their_features, our_features, rtol=0, atol=1e-5)
        assert torch.equal(theirs.logit_scale.exp().reshape(()), encoded.logit_scale)
        if encoded.logit_bias is not None:
            assert torch.equal(theirs.logit_bias.reshape(()), encoded.logit_bias)


def _unread(model: nn.Module) -> dict[str, UnreadTensor]:
    return {name: UnreadTensor.of(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("format", ["safetensors", "pt", "hf"])
def test_open_clip_opens_what_we_write(spec: ModelSpec, format: Any, tmp_path: Path) -> None:
    model = _trained(spec)
    out = tmp_path / "out" if format == "hf" else tmp_path / "out" / f"open_clip_model.{format}"
    files = write_model(_unread(model), spec, out, format=format)
    assert all(file.is_file() for file in files)
    folder = tmp_path / "out"
    theirs, _, preprocess = open_clip.create_model_and_transforms(
        f"local-dir:{folder}", load_weights=format != "pt", pretrained_text=False
    )
    if format == "pt":  # open_clip looks for other endings in a folder; its users name the file
        open_clip.load_checkpoint(theirs, str(out), strict=True)
    assert "0.25" in str(preprocess)
    _same_features(model, theirs)
    kind = {"timm": "CustomTextCLIP", "hf": "CustomTextCLIP"}.get(spec.name, spec.name)
    assert type(theirs).__name__ == kind


def test_the_hub_folder_has_the_tokenizer_that_open_clip_has_built_in(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    spec = ModelSpec("CLIP", CONFIGS["CLIP"], PREPROCESS)
    files = write_model(_unread(build(spec)), spec, tmp_path, format="hf")
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in files}
    theirs, built_in = AutoTokenizer.from_pretrained(tmp_path), open_clip.get_tokenizer("ViT-B-32")
    texts = ["A photo of a cat!", "", "Crème brûlée -- 12,345 it's odd 😀", "many words " * 60]
    for text, row in zip(texts, built_in(texts).tolist(), strict=True):
        end = row.index(max(row)) + 1
        assert theirs(text, truncation=True, max_length=77).input_ids == row[:end]
    assert theirs.model_max_length == 8


PEAK = """
import resource, sys
from pathlib import Path
import torch
from shardclip.training.checkpoint.export import export
from shardclip.training.evaluation.loading import load, locate
torch.set_num_threads(1)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
export(Path(sys.argv[1]), Path(sys.argv[2], "warm.safetensors"))  # libraries load what they need
before = peak()
export(Path(sys.argv[3]), Path(sys.argv[2], "large.safetensors"), dtype=torch.bfloat16)
print(peak() - before)
"""


def _run_of(tensors: dict[str, Tensor], folder: Path) -> Path:
    """A run's folder with a checkpoint of these tensors."""
    folder.mkdir()
    ModelSpec("CLIP", CONFIGS["CLIP"], PREPROCESS).save(folder / "model.json")
    model = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in tensors.items()})
    saver = Checkpoints(folder / "checkpoints", CheckpointConfig(), distributed.current())
    saver.save(64, TrainState(model, torch.optim.SGD(model.parameters())))
    saver.close()
    return folder


@pytest.mark.long
def test_an_export_takes_less_memory_than_twice_the_largest_tensor(tmp_path: Path) -> None:
    largest = 32 * 2**20
    sizes = {f"part{number}": largest // 2 for number in range(12)} | {"largest": largest}
    large = _run_of({name: torch.ones(size) for name, size in sizes.items()}, tmp_path / "large")
    small = _run_of({name: torch.ones(1) for name in sizes}, tmp_path / "small")
    words = [sys.executable, "-c", PEAK, str(small), str(tmp_path), str(large)]
    taken = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    # 896 MiB of weights, the largest 128; what the process took before the tensor is not counted.
    buffers = 16 * 2**20
    assert taken < 2 * 4 * largest + buffers, f"{taken / 2**20:.0f} MiB"
    assert (tmp_path / "large.safetensors").stat().st_size > 2 * sum(sizes.values())


def test_files_of_open_clip_open_here(spec: ModelSpec, tmp_path: Path) -> None:
    config = tmp_path / "open_clip_config.json"
    config.write_text(json.dumps({"model_cfg": spec.model_cfg, "preprocess_cfg": PREPROCESS}))
    theirs = open_clip.create_model(f"local-dir:{tmp_path}", load_weights=False, pretrained_text=False)
    bare, wrapped = tmp_path / "bare.pt", tmp_path / "epoch_1.pt"
    torch.save(theirs.state_dict(), bare)
    under_ddp = OrderedDict((f"module.{name}", value) for name, value in theirs.state_dict().items())
    under_ddp["module.logit_scale"] = under_ddp["module.logit_scale"].reshape(1)
    torch.save({"epoch": 1, "name": "run", "state_dict": under_ddp, "optimizer": {}}, wrapped)
    for path in (bare, wrapped):
        ours = build(spec)
        ours.load_state_dict(read_weights(path))
        _same_features(ours, theirs)


def test_positions_are_resized_and_moments_left_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = CONFIGS["CLIP"]
    large = small | {
        "vision_cfg": small["vision_cfg"] | {"image_size": 32},
        "text_cfg": small["text_cfg"] | {"context_length": 12},
    }
    models = []
    for place, model_cfg in (("small", small), ("large", large)):
        (tmp_path / place).mkdir()
        content = {"model_cfg": model_cfg, "preprocess_cfg": PREPROCESS}
        (tmp_path / place / "open_clip_config.json").write_text(json.dumps(content))
        models.append(open_clip.create_model(f"local-dir:{tmp_path / place}", load_weights=False))
    saved, theirs = models
    path = tmp_path / "epoch_1.pt"
    torch.save({"epoch": 1, "state_dict": saved.state_dict(), "optimizer": {"state": {0: {}}}}, path)
    caplog.set_level("INFO", "shardclip")
    ours = build(ModelSpec("CLIP", large, PREPROCESS), ModelConfig(pretrained=str(path)))
    open_clip.load_checkpoint(theirs, str(path))
    _same_features(ours, theirs, length=12)
    assert "visual.positional_embedding is resized from [5, 32] to [17, 32]" in caplog.text
    assert " positional_embedding is resized from [8, 32] to [12, 32]" in caplog.text
    assert "not the moments of its optimizer" in caplog.text


def test_names_survive_the_way_out_and_back(spec: ModelSpec) -> None:
    names = build(spec).state_dict()
    back = from_open_clip(to_open_clip(names, spec.model_cfg))
    assert list(back) == list(names)


def test_dtype_of_the_file_leaves_the_scale_precise(tmp_path: Path) -> None:
    spec = ModelSpec("CLIP", CONFIGS["CLIP"], PREPROCESS)
    model = _trained(spec)
    path = tmp_path / "half.safetensors"
    write_model(_unread(model), spec, path, dtype=torch.bfloat16)
    read = read_weights(path)
    assert read["visual.proj"].dtype == torch.bfloat16
    assert torch.equal(read["logit_scale"], model.logit_scale)


class Planted:
    """An object that no weights file of ours holds."""


def test_b53_a_planted_object_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"logit_scale": torch.tensor(1.0), "args": Planted()}, path)
    with pytest.raises(UserError, match="Planted"):
        read_file(path)


def test_b53_every_file_written_loads_safely(tmp_path: Path) -> None:
    spec = ModelSpec("CLIP", CONFIGS["CLIP"], PREPROCESS)
    write_model(_unread(build(spec)), spec, tmp_path / "weights.pt", format="pt")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(isinstance(value, Tensor) for value in loaded.values())


def test_a_checkpoint_is_exported_from_its_run(spec: ModelSpec, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    spec.save(run / "model.json")
    model = _trained(spec)
    saver = Checkpoints(run / "checkpoints", CheckpointConfig(), distributed.current())
    saver.save(64, TrainState(model, torch.optim.AdamW(model.parameters())))
    saver.close()
    export(run, tmp_path / "out", format="hf")
    theirs, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    _same_features(model, theirs)
    assert (
        json.loads((tmp_path / "out" / "open_clip_config.json").read_text())["preprocess_cfg"] == PREPROCESS
    )


@pytest.mark.long
def test_a_run_of_five_steps_goes_to_open_clip_and_back(spec: ModelSpec, tmp_path: Path) -> None:
    vocabulary = {"vocab_size": 49408}
    model_cfg = spec.model_cfg | {"text_cfg": spec.model_cfg["text_cfg"] | vocabulary}
    if "hf_model_name" in spec.model_cfg["text_cfg"]:
        (tmp_path / "tower" / "config.json").write_text(
            (tmp_path / "tower" / "config.json")
            .read_text()
            .replace('"vocab_size": 64', '"vocab_size": 49408')
        )
    if "multimodal_cfg" in model_cfg:
        model_cfg |= {"multimodal_cfg": model_cfg["multimodal_cfg"] | vocabulary}
    (tmp_path / "model.json").write_text(json.dumps({"model_cfg": model_cfg, "preprocess_cfg": PREPROCESS}))
    flags = (
        f"train --model-config {tmp_path / 'model.json'} --output-dir {tmp_path} --name run --device cpu "
        "--dataset-type synthetic --train-num-samples 20 --batch-size 4 --epochs 1 --workers 0 "
        "--precision fp32 --lr 1e-3 --warmup 0 --val-frequency 0 --no-pretrained-text"
    )
    assert cli.main(flags.split()) == 0
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--format", "hf"]) == 0
    saved = locate(str(tmp_path / "run"), ModelConfig())
    ours = load(saved)
    theirs, _, _ = open_clip.create_model_and_transforms(
        f"local-dir:{tmp_path / 'out'}", pretrained_text=False
    )
    _same_features(ours, theirs)
    start = build(saved.spec, seed=0).state_dict()
    assert not all(torch.equal(value, start[name]) for name, value in ours.state_dict().items())
    back = build(saved.spec, ModelConfig(pretrained=str(tmp_path / "out" / WEIGHTS_NAME))).state_dict()
    assert all(torch.equal(value, back[name]) for name, value in ours.state_dict().items())


def test_tensors_are_read_one_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def read() -> Tensor:
        assert not [reference for reference in alive if reference() is not None]
        tensor = torch.ones(64, 64)
        alive.append(weakref.ref(tensor))
        return tensor

    unread = {f"part{number}": UnreadTensor((64, 64), torch.float32, read) for number in range(5)}
    path = tmp_path / "parts.safetensors"
    write_safetensors(path, {name: tensor.to(torch.bfloat16) for name, tensor in unread.items()})
    assert len(alive) == 5
    assert all(value.dtype == torch.bfloat16 for value in read_file(path).values())


def test_an_export_of_the_moving_average(tmp_path: Path) -> None:
    spec = ModelSpec("CLIP", CONFIGS["CLIP"], PREPROCESS)
    run = tmp_path / "run"
    run.mkdir()
    spec.save(run / "model.json")
    model, average = _trained(spec), _trained(spec)
    with torch.no_grad():
        average.logit_scale.fill_(2.0)

    class Average:
        def state_dict(self) -> dict[str, Any]:
            return {**dict(average.named_parameters()), "updates": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("nothing is loaded here")

    optimizer = torch.optim.AdamW(model.parameters())
    saver = Checkpoints(run / "checkpoints", CheckpointConfig(), distributed.current())
    saver.save(64, TrainState(model, optimizer, ema=Average()))
    saver.close()
    export(run, tmp_path / "average.safetensors", ema=True)
    export(run, tmp_path / "weights.safetensors")
    assert read_weights(tmp_path / "average.safetensors")["logit_scale"] == 2.0
    assert torch.equal(read_weights(tmp_path / "weights.safetensors")["logit_scale"], model.logit_scale)


def test_an_average_that_is_not_there_cannot_be_exported(tmp_path: Path) -> None:
    spec = ModelSpec("CLIP", CONFIGS["CLIP"], PREPROCESS)
    model = build(spec)
    saver = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(), distributed.current())
    saver.save(64, TrainState(model, torch.optim.AdamW(model.parameters())))
    saver.close()
    with pytest.raises(UserError, match="no moving average"):
        export(tmp_path, tmp_path / "out.safetensors", ema=True)
    with pytest.raises(UserError, match=r"model\.json"):
        export(tmp_path, tmp_path / "out.safetensors")
    with pytest.raises(UserError, match="neither a checkpoint nor a run"):
        export(tmp_path / "elsewhere", tmp_path / "out.safetensors")
