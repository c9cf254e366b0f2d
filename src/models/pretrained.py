"""Starting weights: a tag of open_clip's list, a file, or what lies beside a configuration."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import nn

from shardclip.errors import UserError
from shardclip.models.weights import read_file

if TYPE_CHECKING:
    from shardclip.models.factory import ModelConfig, ModelSpec

_log = logging.getLogger(__name__)

CONFIG_NAME, WEIGHTS_NAME = "open_clip_config.json", "open_clip_model.safetensors"
_PREFERRED = (WEIGHTS_NAME, "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin")
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".bin", ".pth")


def load_starting_weights(model: nn.Module, spec: ModelSpec, config: ModelConfig, path: Path | None) -> None:
    """Give the whole `model`, as open_clip builds it, the weights of a file if there is one; say what it has.

    Raises:
        UserError: they do not fit.
    """
    from open_clip import load_checkpoint

    if path is None:
        _log.info("starting weights: %s", _of_towers(spec, config))
        return
    _log.info("starting weights: %s", path)
    _tell_what_differs(path, model)
    try:
        load_checkpoint(model, str(path), strict=True, weights_only=True)
    except (RuntimeError, AssertionError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        first_lines = "\n".join(line[:300] for line in str(error).splitlines()[:4])
        raise UserError(
            f"{config.pretrained or path} does not fit {spec.name}; --model or --model-config names the "
            f"architecture of a file:\n{first_lines}"
        ) from None


def starting_weights(spec: ModelSpec, config: ModelConfig) -> Path | None:
    """The file with the weights of the whole model; None if it has none to start from.

    As in open_clip, `local-dir:` and `hf-hub:` mean the weights that lie there too; `--pretrained` wins. With
    a file for one tower they mean the architecture alone.

    Raises:
        UserError: the weights that are asked for cannot be had.
    """
    for flag in ("pretrained_image_path", "pretrained_text_path"):
        path = getattr(config, flag)
        if path is not None and not Path(path).is_file():
            raise UserError(f"--{flag.replace('_', '-')} {path}: no such file")
    if config.pretrained:
        return _file_or_tag(spec, config.pretrained, config.cache_dir)
    if config.pretrained_image_path or config.pretrained_text_path:
        return None
    if config.folder is not None:
        return weights_in(config.folder)
    return None if config.hub is None else from_hub(config.hub, None, config.cache_dir)


def text_tower_is_pretrained(spec: ModelSpec, config: ModelConfig) -> bool:
    """Whether a Hugging Face text tower starts from its own weights, if the model as a whole has none."""
    own = spec.model_cfg["text_cfg"]
    asked = config.pretrained_text and own.get("hf_model_pretrained", True) and "hf_model_name" in own
    return bool(asked) and config.pretrained_text_path is None


def weights_in(folder: Path) -> Path | None:
    """The file of weights in a folder, None if there is none.

    Raises:
        UserError: there are several.
    """
    for name in _PREFERRED:
        if (folder / name).is_file():
            return folder / name
    files = [path for path in sorted(folder.iterdir()) if path.suffix in WEIGHT_SUFFIXES]
    if len(files) > 1:
        held = ", ".join(path.name for path in files)
        raise UserError(f"{folder}: one file of weights is wanted beside {CONFIG_NAME}; there are: {held}")
    return files[0] if files else None


def from_hub(name: str, file: str | None, cache_dir: str | None) -> Path:
    """A file of a Hugging Face repository in open_clip's form, downloaded once; None is its weights.

    Raises:
        UserError: it cannot be had.
    """
    from open_clip.pretrained import download_pretrained_from_hf

    try:
        return Path(download_pretrained_from_hf(name, filename=file, cache_dir=cache_dir))
    except Exception as error:
        raise UserError(f"hf-hub:{name}: {file or 'its weights'} cannot be had: {error}") from error


def _of_towers(spec: ModelSpec, config: ModelConfig) -> str:
    """Where the towers' weights come from if the model as a whole has none, in words."""
    image = config.pretrained_image_path or ("timm's own" if config.pretrained_image else "random")
    text = config.pretrained_text_path
    if text is None:
        own = text_tower_is_pretrained(spec, config)
        text = f"{spec.model_cfg['text_cfg']['hf_model_name']}'s own" if own else "random"
    return f"image tower {image}, text tower {text}"


def _tell_what_differs(path: Path, model: nn.Module) -> None:
    """Log what of a file is not taken as it is: an optimizer's moments, and positions of another number."""
    try:
        content = {} if path.suffix in (".npz", ".npy") else read_file(path)
    except UserError:
        return  # a form that open_clip converts, or an error that its loader tells
    if content.get("optimizer"):
        _log.info("%s: weights alone are taken, not the moments of its optimizer; --resume takes both", path)
    own = dict(model.named_parameters())
    for name, value in content.get("state_dict", content).items():
        bare = name.removeprefix("module.")
        parameter = own.get(bare, own.get(f"text.{bare}"))
        if bare.endswith("positional_embedding") and parameter is not None and parameter.shape != value.shape:
            _log.info("%s: %s is resized from %s to %s", path, bare, [*value.shape], [*parameter.shape])


def _file_or_tag(spec: ModelSpec, pretrained: str, cache_dir: str | None) -> Path:
    import open_clip

    if Path(pretrained).is_file():
        return Path(pretrained)
    tag = open_clip.get_pretrained_cfg(spec.name, pretrained)
    if not tag:
        tags = open_clip.list_pretrained_tags_by_model(spec.name)
        raise UserError(
            f"--pretrained {pretrained}: neither a file nor a tag of {spec.name} "
            f"(its tags: {', '.join(tags) or 'none'})"
        )
    _compare_activation(spec, pretrained, tag)
    try:
        return Path(open_clip.download_pretrained(tag, cache_dir=cache_dir))
    except Exception as error:
        raise UserError(f"--pretrained {pretrained}: the download failed: {error}") from error


def _compare_activation(spec: ModelSpec, pretrained: str, tag: dict[str, object]) -> None:
    """Warn where weights that were trained with QuickGELU are put into a model with GELU."""
    if tag.get("quick_gelu") and not spec.model_cfg.get("quick_gelu"):
        _log.warning(
            "--pretrained %s was trained with QuickGELU, and this model has GELU: its features will be "
            "others; --force-quick-gelu gives the model that of the weights",
            pretrained,
        )
