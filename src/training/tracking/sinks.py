"""Where numbers and pictures go beside the console: JSON lines, TensorBoard, W&B, trackio."""

import importlib
import importlib.util
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from PIL.Image import Image

from shardclip.errors import UserError


class Sink(Protocol):
    """One receiver. `kind` is `train` or `val`; `step` counts optimizer steps."""

    def numbers(self, kind: str, values: Mapping[str, Any], step: int, samples_seen: int) -> None:
        """Take the numbers of one moment."""

    def picture(self, name: str, picture: Image, step: int) -> None:
        """Take a picture."""

    def close(self) -> None:
        """Write out what is still held."""


JSON_FILES = {"train": "metrics.jsonl", "val": "results.jsonl"}


class JsonLines:
    """`metrics.jsonl` for training and `results.jsonl` for evaluations: one JSON object a line.

    Files are only appended to. After a resume the clock steps back: a reader drops the lines before that
    reach beyond it (`plotting.read_lines`).
    """

    def __init__(self, run_folder: Path) -> None:
        self._files = {}
        for kind, name in JSON_FILES.items():
            path = run_folder / name
            torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
            self._files[kind] = path.open("a", encoding="utf-8", buffering=1)
            if torn:
                self._files[kind].write("\n")

    def numbers(self, kind: str, values: Mapping[str, Any], step: int, samples_seen: int) -> None:
        """One line; a number that is not finite is null, since JSON knows neither NaN nor infinity."""
        line = {"step": step, "samples_seen": samples_seen, "time": round(time.time(), 3), **values}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._files[kind].write(json.dumps(finite) + "\n")

    def picture(self, name: str, picture: Image, step: int) -> None:
        """Pictures have files of their own."""

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class TensorBoard:
    """Scalars `train/NAME` and `val/NAME`, as open_clip calls them, over optimizer steps."""

    def __init__(self, run_folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run_folder / "tensorboard")

    def numbers(self, kind: str, values: Mapping[str, Any], step: int, samples_seen: int) -> None:
        """One scalar for each number."""
        for name, value in {**values, "samples_seen": samples_seen}.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def picture(self, name: str, picture: Image, step: int) -> None:
        """One image."""
        import numpy

        self._writer.add_image(name, numpy.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbLike:
    """W&B, or trackio, which has the same functions. A resumed run goes on in the same W&B run."""

    def __init__(
        self, module: str, run_folder: Path, project: str, notes: str, settings: Mapping[str, Any]
    ) -> None:
        self._module: Any = importlib.import_module(module)
        options: dict[str, Any] = {"project": project, "name": run_folder.name, "config": dict(settings)}
        if module == "wandb":
            identity = run_folder / "wandb_id.txt"
            if not identity.exists():
                identity.write_text(self._module.util.generate_id(), encoding="utf-8")
            options |= {"notes": notes, "id": identity.read_text(encoding="utf-8").strip()}
        self._module.init(**options, resume="allow")

    def numbers(self, kind: str, values: Mapping[str, Any], step: int, samples_seen: int) -> None:
        """All numbers of the moment in one call."""
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self._module.log({**named, "samples_seen": samples_seen, "step": step}, step=step)

    def picture(self, name: str, picture: Image, step: int) -> None:
        """One image."""
        self._module.log({name: self._module.Image(picture)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._module.finish()


REPORTERS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Name in --report-to -> the package that it needs."""


def reporter_names(report_to: str) -> list[str]:
    """The names in `--report-to`; `all` means every one that is installed, as in open_clip.

    Raises:
        UserError: a name is unknown, or its package is not installed.
    """
    names = [name for name in report_to.replace(",", " ").split() if name != "none"]
    if names == ["all"]:
        return [name for name, package in REPORTERS.items() if importlib.util.find_spec(package)]
    for name in names:
        if name not in REPORTERS:
            raise UserError(f"--report-to: {name!r} is none of {', '.join(REPORTERS)}")
        if importlib.util.find_spec(REPORTERS[name]) is None:
            raise UserError(f"--report-to {name}: the package is missing: pip install {REPORTERS[name]}")
    return names


def open_sinks(
    report_to: str, run_folder: Path, project: str, notes: str, settings: Mapping[str, Any]
) -> dict[str, Sink]:
    """JSON lines and what `--report-to` names, by name."""
    sinks: dict[str, Sink] = {"jsonl": JsonLines(run_folder)}
    for name in reporter_names(report_to):
        sinks[name] = (
            TensorBoard(run_folder)
            if name == "tensorboard"
            else WandbLike(name, run_folder, project, notes, settings)
        )
    return sinks
