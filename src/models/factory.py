"""From a name or a JSON file to a model, its tokenizer and what its image tower wants to see.

open_clip's configurations are the one description of an architecture here: its built-in names, a JSON file
in its form, or a folder with an `open_clip_config.json`. open_clip builds the towers (native, timm, Hugging
Face, CoCa); `DualEncoder` holds them.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardclip.errors import UserError
from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.pretrained import (
    CONFIG_NAME,
    from_hub,
    load_starting_weights,
    starting_weights,
    text_tower_is_pretrained,
)

CONFIGS = Path(__file__).parent / "configs"
"""Architectures that ship beside open_clip's: JSON files in its form, named like the model."""


@dataclass(frozen=True)
class ModelConfig:
    """What is learnt: architecture, starting weights, image and text input."""

    model: str = "ViT-B-32"
    """Architecture: ViT-G-14, ViT-X-14, mt5-xxl-ViT-G-14, a name of open_clip's list, or `local-dir:FOLDER` /
    `hf-hub:NAME`, with the weights that lie there."""
    model_config: str | None = None
    """JSON file with a configuration of one's own, in open_clip's form; replaces --model."""
    pretrained: str | None = None
    """Weights to start from: a tag of open_clip's list or a file (.pt, .bin, .safetensors)."""
    pretrained_image: bool = False
    """Start a timm image tower from timm's own weights."""
    pretrained_text: bool = True
    """Start a Hugging Face text tower from its own weights, unless others are given for it."""
    pretrained_image_path: str | None = None
    """File with weights of the image tower alone."""
    pretrained_text_path: str | None = None
    """File with weights of the text tower alone."""
    cache_dir: str | None = None
    """Folder where downloaded weights are kept."""
    force_quick_gelu: bool = False
    """Use the QuickGELU of OpenAI's models."""
    force_patch_dropout: float | None = None
    """Share of patches dropped in training (0 switches it off, for fine-tuning)."""
    force_image_size: int | None = None
    """Side of the square input image, in pixels."""
    force_context_length: int | None = None
    """Length of the token sequence."""
    image_mean: tuple[float, float, float] | None = None
    """Mean of the pixel values that is subtracted, per channel, pixels in 0 to 1."""
    image_std: tuple[float, float, float] | None = None
    """Standard deviation of the pixel values that is divided by, per channel, pixels in 0 to 1."""
    image_interpolation: Literal["bicubic", "bilinear", "random"] | None = None
    """Interpolation when pictures are resized."""
    image_resize_mode: Literal["shortest", "longest", "squash"] | None = None
    """How a picture is fitted to the input size in evaluation."""

    @property
    def folder(self) -> Path | None:
        """The folder that `model` names by `local-dir:`."""
        name = self._of_schema("local-dir")
        return None if name is None else Path(name)

    @property
    def hub(self) -> str | None:
        """The Hugging Face repository that `model` names by `hf-hub:`."""
        return self._of_schema("hf-hub")

    def _of_schema(self, schema: str) -> str | None:
        from open_clip.factory import parse_model_name

        if self.model_config is not None:
            return None
        try:
            found, name = parse_model_name(self.model)
        except ValueError as error:
            raise UserError(f"--model {self.model}: {error}") from None
        return name if found == schema else None


@dataclass(frozen=True)
class ModelSpec:
    """An architecture, fully resolved: plain values that travel in a checkpoint."""

    name: str
    """For people: the configuration's name."""
    model_cfg: dict[str, Any]
    """open_clip's `model_cfg`."""
    preprocess_cfg: dict[str, Any]
    """open_clip's `preprocess_cfg`: size, mean, std, interpolation, resize_mode, fill_color."""

    @property
    def is_sigmoid(self) -> bool:
        """Whether the model carries the bias that the sigmoid loss needs."""
        return self.model_cfg.get("init_logit_bias") is not None

    @property
    def is_captioning(self) -> bool:
        """Whether the model has a text decoder (CoCa)."""
        return "multimodal_cfg" in self.model_cfg

    def save(self, path: Path) -> None:
        """Write the specification as JSON, in the form of `open_clip_config.json` plus the name."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> ModelSpec:
        """Read what `save` wrote, or an `open_clip_config.json`."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return ModelSpec(
            values.get("name", path.parent.name), values["model_cfg"], values.get("preprocess_cfg", {})
        )


def resolve(config: ModelConfig, *, sigmoid: bool = False) -> ModelSpec:
    """The architecture that the flags ask for.

    Args:
        config: the flags.
        sigmoid: give the model the scale and the bias that the sigmoid loss starts from (SigLIP,
            https://arxiv.org/abs/2303.15343, 3.2: 10 and -10).

    Raises:
        UserError: the name is unknown, or the configuration cannot be read.
    """
    name, model_cfg, preprocess_cfg = _read_architecture(config)
    vision_cfg, text_cfg = model_cfg["vision_cfg"], model_cfg["text_cfg"]
    if sigmoid:
        model_cfg |= {"init_logit_scale": math.log(10.0), "init_logit_bias": -10.0}
    if config.force_quick_gelu:
        model_cfg["quick_gelu"] = True
    if config.force_patch_dropout is not None:
        vision_cfg["patch_dropout"] = config.force_patch_dropout
    if config.force_image_size is not None:
        vision_cfg["image_size"] = config.force_image_size
    if config.force_context_length is not None:
        text_cfg["context_length"] = config.force_context_length
    return ModelSpec(name, model_cfg, _preprocessing(config, vision_cfg, preprocess_cfg))


def _read_architecture(config: ModelConfig) -> tuple[str, dict[str, Any], dict[str, Any]]:
    import open_clip
    from open_clip.factory import get_model_config

    if config.model_config is not None:
        path = Path(config.model_config)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"--model-config {path}: {error}") from None
        model_cfg = values.get("model_cfg", values)
        missing = {"embed_dim", "vision_cfg", "text_cfg"} - set(model_cfg)
        if missing:
            raise UserError(
                f"--model-config {path}: {', '.join(sorted(missing))} missing; open_clip's form is wanted"
            )
        return path.stem, model_cfg, values.get("preprocess_cfg", {})
    if config.folder is not None:
        spec = _read_folder(config.folder)
        return spec.name, spec.model_cfg, spec.preprocess_cfg
    if config.hub is not None:
        try:
            spec = ModelSpec.load(from_hub(config.hub, CONFIG_NAME, config.cache_dir))
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"--model {config.model}: no usable {CONFIG_NAME} there ({error})") from None
        return config.hub, spec.model_cfg, spec.preprocess_cfg
    shipped = {path.stem: path for path in CONFIGS.glob("*.json")}
    if config.model in shipped:
        return config.model, json.loads(shipped[config.model].read_text(encoding="utf-8")), {}
    found = get_model_config(config.model)
    if found is None:
        known = [*shipped, *open_clip.list_models()]
        near = difflib.get_close_matches(config.model, known, n=3, cutoff=0.4)
        raise UserError(
            f"--model {config.model}: there is no configuration of that name; "
            f"nearest: {', '.join(near) or 'none'}. A JSON file of your own goes to --model-config."
        )
    preprocess_cfg: dict[str, Any] = {}
    if config.pretrained:
        preprocess_cfg = open_clip.get_pretrained_cfg(config.model, config.pretrained) or {}
    return config.model, found, preprocess_cfg


def _read_folder(folder: Path) -> ModelSpec:
    try:
        return ModelSpec.load(folder / CONFIG_NAME)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"--model local-dir:{folder}: no usable {CONFIG_NAME} there ({error})") from None


def _preprocessing(
    config: ModelConfig, vision_cfg: dict[str, Any], preprocess_cfg: dict[str, Any]
) -> dict[str, Any]:
    from open_clip.transform import PreprocessCfg, merge_preprocess_dict

    asked = {
        "mean": config.image_mean,
        "std": config.image_std,
        "interpolation": config.image_interpolation,
        "resize_mode": config.image_resize_mode,
    }
    merged = merge_preprocess_dict(merge_preprocess_dict(PreprocessCfg(), preprocess_cfg), asked)
    merged["size"] = vision_cfg.get("image_size", 224)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in merged.items()}


@contextmanager
def _as_folder(spec: ModelSpec) -> Iterator[str]:
    """open_clip's public way to take any configuration: a folder with its JSON file."""
    with tempfile.TemporaryDirectory() as folder:
        content = {"model_cfg": spec.model_cfg, "preprocess_cfg": spec.preprocess_cfg}
        Path(folder, CONFIG_NAME).write_text(json.dumps(content), encoding="utf-8")
        yield f"local-dir:{folder}"


def build(spec: ModelSpec, config: ModelConfig | None = None, *, seed: int | None = None) -> DualEncoder:
    """The plain model on the CPU in fp32, with its starting weights.

    Args:
        spec: the architecture.
        config: where starting weights come from; None means random ones.
        seed: seeds the random weights; None leaves the global generator as it is.

    Raises:
        UserError: weights that were asked for cannot be found or do not fit.
    """
    if seed is not None:
        torch.manual_seed(seed)
    path = None if config is None else starting_weights(spec, config)
    text_weights = config is not None and path is None and text_tower_is_pretrained(spec, config)
    model = _open_clip_model(spec, config or ModelConfig(), text_weights=text_weights)
    _initialise_decoder(model)
    if config is not None:
        load_starting_weights(model, spec, config, path)
    return _adopt(model.float())


def build_meta(spec: ModelSpec) -> DualEncoder:
    """The model without memory: parameters and buffers on the meta device."""
    with torch.device("meta"):
        # A text tower of Hugging Face's comes in the dtype that its configuration names.
        return _adopt(_open_clip_model(spec, ModelConfig(), device="meta").float())


def _open_clip_model(
    spec: ModelSpec, config: ModelConfig, device: str = "cpu", text_weights: bool = False
) -> nn.Module:
    import open_clip

    with _as_folder(spec) as folder, _quiet_open_clip():
        try:
            return open_clip.create_model(
                folder,
                device=device,
                load_weights=False,
                # Two towers as two modules, so that the root holds nothing but scale and bias.
                force_custom_text=True,
                pretrained_image=config.pretrained_image,
                pretrained_text=text_weights,
                pretrained_image_path=config.pretrained_image_path,
                pretrained_text_path=config.pretrained_text_path,
                cache_dir=config.cache_dir,
            )
        except (RuntimeError, ValueError, TypeError, OSError, AssertionError, KeyError) as error:
            hint = " (--no-pretrained-text starts the text tower from random weights)" if text_weights else ""
            raise UserError(
                f"model {spec.name} cannot be built from its configuration: {error}{hint}"
            ) from error


def _initialise_decoder(model: nn.Module) -> None:
    """Give CoCa's vocabulary projection random weights.

    open_clip 3.3.0 leaves them as raw memory, so a run would start from whatever was there, NaN included. The
    spread is that of its text tower's projection.
    """
    decoder = getattr(model, "text_decoder", None)
    if decoder is not None:
        nn.init.normal_(decoder.text_projection, std=decoder.text_projection.shape[0] ** -0.5)


def _draw_patches_where_they_are(visual: nn.Module) -> None:
    """Give the image tower timm's patch dropout: open_clip's draws on the CPU, and a GPU waits for that."""
    from open_clip.transformer import PatchDropout as OnTheCpu
    from timm.layers import PatchDropout

    dropout = getattr(visual, "patch_dropout", None)
    if isinstance(dropout, OnTheCpu):
        visual.patch_dropout = PatchDropout(dropout.prob, int(dropout.exclude_first_token))


@contextmanager
def _quiet_open_clip() -> Iterator[None]:
    """Without the messages about the temporary folder: they would puzzle, and the run reports its own."""
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def _adopt(model: Any) -> DualEncoder:
    _draw_patches_where_they_are(model.visual)
    bias = model.logit_bias
    is_meta = model.logit_scale.is_meta
    return DualEncoder(
        visual=model.visual,
        text=model.text,
        logit_scale=0.0 if is_meta else model.logit_scale.item(),
        logit_bias=None if bias is None else 0.0 if is_meta else bias.item(),
        text_decoder=getattr(model, "text_decoder", None),
    )


def tokenizer(spec: ModelSpec) -> Callable[[list[str]], Tensor]:
    """The text tower's tokenizer: captions to token ids [T, L], int64.

    Raises:
        UserError: the tokenizer's files cannot be had.
    """
    import open_clip
    from open_clip.tokenizer import HFTokenizer

    text_cfg = spec.model_cfg["text_cfg"]
    length, name = text_cfg.get("context_length"), text_cfg.get("hf_tokenizer_name")
    try:
        if name:
            # Not by way of a folder, as open_clip would look for the tokenizer's files in it.
            more = text_cfg.get("tokenizer_kwargs", {})
            return HFTokenizer(name, length or 77, tokenizer_mode=text_cfg.get("tokenizer_mode"), **more)
        with _as_folder(spec) as folder, _quiet_open_clip():
            return open_clip.get_tokenizer(folder, context_length=length)
    except OSError as error:
        raise UserError(f"the tokenizer of {spec.name} ({name}) cannot be loaded: {error}") from error


def pad_id(spec: ModelSpec) -> int:
    """The token id that fills captions up, as CoCa's caption loss leaves it out."""
    return int(spec.model_cfg.get("text_cfg", {}).get("pad_id", 0))
