"""Weights and their configuration as files that `open_clip.create_model_and_transforms` opens.

Tensors are given unread and written one at a time, so that the export of a model needs no more memory than
its largest tensor. The safetensors format (https://github.com/huggingface/safetensors#format) is a JSON
header and then the tensors' bytes; its own library writes only what is in memory as a whole.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shardclip.models.factory import ModelSpec, tokenizer
from shardclip.models.pretrained import CONFIG_NAME, WEIGHTS_NAME
from shardclip.models.weights import to_open_clip

Format = Literal["safetensors", "pt", "hf"]
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class UnreadTensor:
    """A tensor that is read when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Returns it, on the CPU."""

    @staticmethod
    def of(tensor: Tensor) -> UnreadTensor:
        """One that is in memory already."""
        return UnreadTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def to(self, dtype: torch.dtype | None) -> UnreadTensor:
        """The same in another floating dtype. Integers stay, and so do 0-D tensors: bf16 near the scale's
        parameter ln(100) has steps of 3 %.
        """
        if dtype is None or not self.dtype.is_floating_point or not self.shape:
            return self
        return UnreadTensor(self.shape, dtype, lambda: self.read().to(dtype))

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_model(
    tensors: Mapping[str, UnreadTensor],
    spec: ModelSpec,
    out: Path,
    *,
    format: Format = "safetensors",
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write weights and configuration.

    Args:
        tensors: by our names.
        spec: the architecture.
        out: for `hf` a folder, for `safetensors` and `pt` a file; the configuration goes beside the file.
        format: what to write.
        dtype: dtype of the floating tensors in the file; None leaves each as it is.

    Returns:
        The files written.
    """
    named = {name: tensor.to(dtype) for name, tensor in to_open_clip(tensors, spec.model_cfg).items()}
    folder = out if format == "hf" else out.parent
    weights = out / WEIGHTS_NAME if format == "hf" else out
    folder.mkdir(parents=True, exist_ok=True)
    if format == "pt":
        _write_pt(weights, named)
    else:
        write_safetensors(weights, named)
    config = folder / CONFIG_NAME
    content = {"model_cfg": spec.model_cfg, "preprocess_cfg": spec.preprocess_cfg}
    config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return [weights, config, *(_write_tokenizer(spec, folder) if format == "hf" else [])]


def write_safetensors(path: Path, tensors: Mapping[str, UnreadTensor]) -> None:
    """Write a .safetensors file, one tensor in memory at a time. It gets its name when it is complete."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Largest elements first: keeps every tensor aligned to its element, which readers map into memory.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.bytes],
        }
        offset += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            value = tensors[name].read().contiguous().reshape(-1)
            file.write(value.view(torch.uint8).numpy().data)
    partial.replace(path)


def _write_pt(path: Path, tensors: Mapping[str, UnreadTensor]) -> None:
    """Write what `torch.load` reads, by way of a safetensors file that is mapped into memory."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        mapped = Path(folder, "weights.safetensors")
        write_safetensors(mapped, tensors)
        partial = Path(folder, path.name)
        torch.save(load_file(mapped), partial)
        partial.replace(path)


def _write_tokenizer(spec: ModelSpec, folder: Path) -> list[Path]:
    """The files of a Hugging Face tokenizer: the text tower's own, or the one that open_clip has built in."""
    from open_clip.tokenizer import SimpleTokenizer

    own: Any = tokenizer(spec)
    if isinstance(own, SimpleTokenizer):
        if spec.model_cfg["text_cfg"].get("tokenizer_kwargs"):
            return []  # cleans text in a way that those files cannot say
        own = _as_hugging_face(own)
    before = set(folder.iterdir())
    own.save_pretrained(folder)
    return sorted(set(folder.iterdir()) - before)


def _as_hugging_face(own: Any) -> Any:
    """open_clip's built-in tokenizer as transformers' class: the same ids up to the end mark.

    It pads with the end mark, as CLIP's on the hub do; the tower reads up to the first one.
    """
    from transformers import CLIPTokenizer

    *words, start, end = own.encoder
    vocabulary = {word: own.encoder[word] for word in words}
    vocabulary |= {"<|startoftext|>": own.encoder[start], "<|endoftext|>": own.encoder[end]}
    return CLIPTokenizer(vocab=vocabulary, merges=list(own.bpe_ranks), model_max_length=own.context_length)
