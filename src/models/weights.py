"""Weight files of open_clip and ours: which names they use, and how they are read without unpickling."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardclip.errors import UserError

T = TypeVar("T")
_TEXT_TOWER = ("positional_embedding", "text_projection", "token_embedding", "ln_final", "transformer")
"""What `open_clip.CLIP` keeps of its text tower at the root, and everything else under `text.`."""
_SCALARS = ("logit_scale", "logit_bias")


def has_text_at_root(model_cfg: Mapping[str, Any]) -> bool:
    """Whether open_clip builds `CLIP` from a configuration, not `CustomTextCLIP` or `CoCa`."""
    return not (model_cfg.get("custom_text") or "hf_model_name" in model_cfg["text_cfg"])


def to_open_clip(tensors: Mapping[str, T], model_cfg: Mapping[str, Any]) -> dict[str, T]:
    """Our names to those of the class that open_clip builds from `model_cfg`.

    Args:
        tensors: by the names of `DualEncoder` (a text tower under `text.`); values are passed on as they are.
        model_cfg: the architecture, in open_clip's form.
    """
    if not has_text_at_root(model_cfg):
        return dict(tensors)
    return {
        name.removeprefix("text.") if _root_part(name.removeprefix("text.")) in _TEXT_TOWER else name: value
        for name, value in tensors.items()
    }


def from_open_clip(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights in what an open_clip file holds, by our names.

    Takes bare state dicts and training checkpoints (`state_dict`), of `CLIP`, `CustomTextCLIP` or `CoCa`,
    saved plain, under DDP or compiled, with a scale of shape [] or [1].

    Raises:
        UserError: there are no weights in it.
    """
    content: Any = tensors.get("state_dict", tensors)
    weights = {_bare(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if "logit_scale" not in weights:
        raise UserError(f"not the weights of a CLIP-like model: it has no logit_scale, but {_some(content)}")
    for name in _SCALARS:
        if name in weights:
            weights[name] = weights[name].reshape(())
    # Older versions of transformers stored this constant; the model makes it itself.
    weights.pop("text.transformer.embeddings.position_ids", None)
    if "positional_embedding" not in weights:
        return weights
    return {f"text.{name}" if _root_part(name) in _TEXT_TOWER else name: v for name, v in weights.items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a .safetensors, .pt or .bin file of open_clip's or ours, by our names; mapped, not read.

    Raises:
        UserError: the file cannot be read, or holds objects other than tensors and plain values.
    """
    return from_open_clip(read_file(path))


def read_file(path: Path) -> dict[str, Any]:
    """All that such a file holds, as it is. A pickled object in it is refused by its name.

    Raises:
        UserError: as for `read_weights`.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        # Only the zip form can be mapped into memory; the one before torch 1.6 is read at once.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: refused: {_refusal(error)}") from None
    except Exception as error:
        raise UserError(f"{path}: cannot be read as weights: {_first_line(error)}") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__}, not weights by name")
    return dict(content)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _bare(name: str) -> str:
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def _root_part(name: str) -> str:
    return name.partition(".")[0]


def _refusal(error: Exception) -> str:
    """The line of torch's explanation that has the object's name."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler error" in line]
    return (named or lines or [type(error).__name__])[0]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _some(content: Mapping[str, Any]) -> str:
    return ", ".join(list(map(str, content))[:4]) or "nothing"
