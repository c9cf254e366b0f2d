"""The small verbs: flags of their own and one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from shardclip.errors import UserError


@dataclass(frozen=True)
class IndexCommand:
    """Index tar shards: count their samples and note where each member lies, so that a run starts at once."""

    data: Annotated[str, tyro.conf.Positional] = ""
    """Shards, in any form that --train-data takes: brace ranges, folders, lists, `::` between sources."""
    sample_key: Literal["first-dot", "last-dot"] = "first-dot"
    """Where a member's name is cut into key and suffix; as `shardclip train --sample-key`."""


@dataclass(frozen=True)
class ExportCommand:
    """Write the weights of a run as a file (or folder) that open_clip opens."""

    source: Annotated[str, tyro.conf.Positional] = ""
    """Folder of a run (its newest whole checkpoint is taken), or of a checkpoint."""
    out: Path = Path("model.safetensors")
    """File to write, or folder for --format hf."""
    format: Literal["safetensors", "pt", "hf"] = "safetensors"
    """safetensors or pt: weights, and the configuration beside them; hf: a folder as on the hub."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Precision of the weights in the file; default: as they are."""
    ema: bool = False
    """The moving average of the weights instead of the weights."""


def index(argv: Sequence[str]) -> int:
    """`shardclip index DATA`."""
    command = tyro.cli(IndexCommand, args=argv, prog="shardclip index")
    if not command.data:
        raise UserError("shardclip index DATA: no shards are named")
    from shardclip.training.data.index import build_index

    return build_index(command.data, command.sample_key)


def export(argv: Sequence[str]) -> int:
    """`shardclip export RUN --out FILE`."""
    command = tyro.cli(ExportCommand, args=argv, prog="shardclip export")
    if not command.source:
        raise UserError("shardclip export RUN: no run is named")
    import torch

    from shardclip.training.checkpoint import export as exporting
    from shardclip.training.checkpoint.storage import any_path

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = None if command.dtype is None else dtypes[command.dtype]
    for path in exporting.export(
        any_path(command.source), command.out, format=command.format, dtype=dtype, ema=command.ema
    ):
        print(path)
    return 0
