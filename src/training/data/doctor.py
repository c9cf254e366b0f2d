"""`shardclip doctor DATA`: what is in the data and whether a run on it would start.

Under torchrun or srun (`srun shardclip doctor DATA`) it also says which hosts cannot read it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from shardclip.training.data.config import DataConfig
from shardclip.training.data.decode import Undecodable, evaluation_decoder, open_picture
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.index import shard_index
from shardclip.training.data.ranges import Pieces, fingerprint, has_ranges
from shardclip.training.data.remote import open_stream
from shardclip.training.data.samples import LeftOut, SampleMaker, caption_id
from shardclip.training.data.sources import Source, expand, is_local, kind_of, open_source
from shardclip.training.distributed import DistributedConfig, Processes
from shardclip.training.worker import run_worker

SHEET = 6
"""Pictures along a side of the sheet."""
SIDE = 160
SETTINGS = (
    "dataset-type",
    "image-key",
    "text-key",
    "json-text-key",
    "csv-separator",
    "csv-img-key",
    "csv-caption-key",
    "csv-label-key",
    "sample-key",
)
"""How the data is to be read, as for training: what a message asks for can be given."""


@dataclass
class Findings:
    """What was found in one source."""

    name: str
    shards: int
    samples: int
    smallest: int
    """Samples of the smallest shard."""
    largest: int
    found: str
    """Suffixes or columns found and wanted."""
    missing: list[str] = field(default_factory=list)
    """Numbers that the shards' names leave out."""
    damaged: list[str] = field(default_factory=list)
    """Shards whose tar ends early, and how."""
    read: int = 0
    """Samples that were looked at."""
    left_out: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """A sample for each reason."""
    sides: list[tuple[int, int]] = field(default_factory=list)
    """Width and height of the pictures looked at."""
    captions: Counter[int] = field(default_factory=Counter)
    pictures: Counter[int] = field(default_factory=Counter)
    shown: list[tuple[Image.Image, str]] = field(default_factory=list)
    """Pictures and captions for the sheet."""

    @property
    def usable(self) -> int:
        """Samples looked at that a run would train on."""
        return self.read - sum(self.left_out.values())

    def would_start(self, max_skip_rate: float) -> bool:
        """Whether a run would go on beyond these samples."""
        return self.usable > 0 and self.read - self.usable <= max_skip_rate * self.read


def doctor(config: DataConfig, processes: Processes, looked_at: int = 512, sheet: Path | None = None) -> int:
    """Look at --train-data as a run would, print what is found, and draw a sheet of pictures with captions.
    Every rank calls this: all of them see whether they can read the data, rank 0 looks into it.

    Args:
        looked_at: samples of each source that are decoded, spread evenly over it.
        sheet: PNG file to write.

    Returns:
        0 if a run would start, 1 if not; the same on all ranks.
    """
    with processes.together("finding the data"):
        listed = expand(config.train_data or "")
        seen = {shard: bytes_of(shard) for shard in _checked_here(listed, processes)}
    failing = out_of_reach(processes.all_gather_object((processes.host, seen)))
    good = not failing
    console = Console()
    with processes.together("looking at the data"):
        if processes.is_primary and failing:
            console.print(f"not readable from every rank: {_first(failing)}", highlight=False)
        elif processes.is_primary:
            if processes.is_distributed:
                hosts = processes.world_size // processes.local_world_size
                console.print(
                    f"readable from all {processes.world_size} ranks ({hosts} hosts)", highlight=False
                )
            good = _report(listed, config, looked_at, sheet, console)
    return processes.broadcast_object(0 if good else 1)


def _report(
    listed: list[list[str]], config: DataConfig, looked_at: int, sheet: Path | None, console: Console
) -> bool:
    """Print the findings of all sources, draw the sheet; whether a run would start."""
    findings = [examine(shards, config, looked_at) for shards in listed]
    for one in findings:
        console.print(table_of(one, config.max_skip_rate), highlight=False)
    if sheet is not None and (shown := [pair for one in findings for pair in one.shown]):
        draw_sheet(shown).save(sheet)
        console.print(f"pictures and captions: {sheet}", highlight=False)
    return all(one.would_start(config.max_skip_rate) for one in findings)


def _checked_here(listed: list[list[str]], processes: Processes) -> list[str]:
    """The shards that this rank tries to read: the ranks of a host share them out."""
    shards = [shard for source in listed for shard in source]
    return shards[processes.local_rank :: processes.local_world_size]


def bytes_of(shard: str) -> int | str:
    """Bytes of a shard or table whose beginning can be read (-1 where only reading it all would tell), else
    why it cannot."""
    try:
        if not has_ranges(shard) and not is_local(shard):
            stream = open_stream(shard)
            stream.read(512)
            stream.close()
            return -1
        Pieces().read(shard, 0, 512)
        return int(fingerprint(shard)[0])
    except OSError as error:
        return str(error) or type(error).__name__


def out_of_reach(told: list[tuple[str, dict[str, int | str]]]) -> list[str]:
    """What some hosts cannot read, or see otherwise than others, from each rank's (host, `bytes_of` shards).

    A list of shards may itself differ between hosts, where folders do.
    """
    hosts = sorted({host for host, _ in told})
    sizes: dict[str, dict[str, int | str]] = {}
    for host, seen in told:
        for shard, found in seen.items():
            sizes.setdefault(shard, {})[host] = found
    failing = []
    for shard, by_host in sizes.items():
        failing += [
            f"{shard} on {host}: {found}" for host, found in by_host.items() if isinstance(found, str)
        ]
        failing += [f"{shard} on {host}: not there" for host in hosts if host not in by_host]
        known = {host: found for host, found in by_host.items() if isinstance(found, int)}
        if len(set(known.values())) > 1:
            failing.append(
                f"{shard}: " + ", ".join(f"{size} bytes on {host}" for host, size in known.items())
            )
    return failing


def examine(shards: list[str], config: DataConfig, looked_at: int) -> Findings:
    """Index a source and decode some of its samples."""
    source = open_source(shards, config, config.wanted(), first=0)
    counts = source.shard_samples
    findings = Findings(
        source.name,
        len(shards),
        int(counts.sum()),
        int(counts.min()),
        int(counts.max()),
        source.found(),
        gaps(shards),
    )
    if kind_of(shards, config) in ("tar", "stream"):
        indexes = ((path, shard_index(path, config.sample_key).damage) for path in shards)
        findings.damaged = [f"{path}: {damage}" for path, damage in indexes if damage]
    decoder = evaluation_decoder(ImageInput(size=(SIDE, SIDE)), config.max_image_pixels)
    maker = SampleMaker(config, decoder)
    numbers = np.unique(np.linspace(0, findings.samples - 1, looked_at).astype(np.int64))
    for number in numbers:
        look_at(int(number), source, maker, findings, config.max_image_pixels)
    return findings


def look_at(number: int, source: Source, maker: SampleMaker, findings: Findings, max_pixels: int) -> None:
    """Read one sample, counted through all shards, and note what it is."""
    ends = np.cumsum(source.shard_samples)
    shard = int(np.searchsorted(ends, number, side="right"))
    within = number - int(ends[shard] - source.shard_samples[shard])
    raw = source.fetch(source.locate(shard, np.array([within]))[0])
    findings.read += 1
    try:
        sample = maker.make(raw)
    except LeftOut as reason:
        findings.left_out[str(reason)] += 1
        findings.examples.setdefault(str(reason), raw.key)
        return
    content = raw.parts.get("image")
    if isinstance(content, bytes):
        try:
            findings.sides.append(open_picture(content, max_pixels).size)
        except Undecodable:
            return
        findings.pictures[hash(content)] += 1
    findings.captions.update(caption_id(caption) for caption in sample.captions)
    if sample.pixels is not None and len(findings.shown) < SHEET * SHEET:
        picture = Image.fromarray(sample.pixels)
        findings.shown.append((picture, sample.captions[0] if sample.captions else ""))


def gaps(shards: list[str]) -> list[str]:
    """The numbers that are missing between the first and the last of shards with numbered names."""
    numbered = [re.fullmatch(r"(.*?)(\d+)(\D*)", os.path.basename(shard)) for shard in shards]
    found = [(int(match[2]), len(match[2])) for match in numbered if match is not None]
    if len(found) < len(shards) or len(found) < 2:
        return []
    present, width = {number for number, _ in found}, found[0][1]
    return [f"{n:0{width}d}" for n in range(min(present), max(present)) if n not in present]


def table_of(findings: Findings, max_skip_rate: float) -> Table:
    """The findings of one source in words."""
    table = Table("", "found", title=findings.name, title_justify="left")
    table.add_row("shards", f"{findings.shards}, of {findings.smallest} to {findings.largest} samples")
    table.add_row("samples", f"{findings.samples}, of which {findings.read} were looked at")
    table.add_row("offers", findings.found)
    if findings.missing:
        table.add_row("numbers left out", _first(findings.missing))
    if findings.damaged:
        table.add_row("damaged", _first(findings.damaged))
    for reason, count in findings.left_out.most_common():
        table.add_row(
            reason, f"{count} ({count / findings.read:.1%}), for example {findings.examples[reason]}"
        )
    for name, counts in (("captions", findings.captions), ("pictures", findings.pictures)):
        repeated = sum(count - 1 for count in counts.values())
        table.add_row(f"repeated {name}", f"{repeated} of {counts.total()}")
    if findings.sides:
        widths, heights = np.array(findings.sides).T
        table.add_row(
            "width x height",
            f"median {np.median(widths):.0f} x {np.median(heights):.0f}, smallest {widths.min()} x "
            f"{heights.min()}, largest {widths.max()} x {heights.max()}",
        )
    verdict = "yes" if findings.would_start(max_skip_rate) else "no"
    table.add_row("would a run start", f"{verdict}: {findings.usable} of {findings.read} are usable")
    return table


def _first(items: list[str]) -> str:
    return f"{len(items)}: {', '.join(items[:5])}{', ...' if len(items) > 5 else ''}"


def draw_sheet(shown: list[tuple[Image.Image, str]]) -> Image.Image:
    """Pictures in a grid, each above its caption."""
    rows = -(-len(shown) // SHEET)
    sheet = Image.new("RGB", (SHEET * (SIDE + 8), rows * (SIDE + 40)), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (picture, caption) in enumerate(shown[: SHEET * SHEET]):
        left, top = place % SHEET * (SIDE + 8), place // SHEET * (SIDE + 40)
        sheet.paste(picture, (left, top))
        lines = "\n".join(caption[start : start + 26] for start in (0, 26, 52))
        draw.text((left, top + SIDE), lines.encode("latin-1", "replace").decode("latin-1"), fill="black")
    return sheet


def main(argv: Sequence[str]) -> int:
    """The verb from its words."""
    parser = argparse.ArgumentParser(
        "shardclip doctor", description="what is in the data, and would a run start"
    )
    parser.add_argument("data", help="shards or tables in the form that --train-data takes")
    parser.add_argument(
        "--samples", type=int, default=512, help="samples of each source to decode (%(default)s)"
    )
    parser.add_argument("--sheet", type=Path, default=Path("data.png"), help="PNG of pictures with captions")
    hints = get_type_hints(DataConfig)
    for name in SETTINGS:
        field = name.replace("-", "_")
        choices = get_args(hints[field]) if get_origin(hints[field]) is Literal else None
        parser.add_argument(
            f"--{name}",
            choices=choices,
            default=getattr(DataConfig, field),
            help="as for training (%(default)s)",
        )
    options = vars(parser.parse_args(list(argv)))
    data, samples, sheet = options.pop("data"), options.pop("samples"), options.pop("sheet")
    config = DataConfig(train_data=data, **options)
    return run_worker(
        lambda processes: doctor(config, processes, samples, sheet), DistributedConfig(device="cpu")
    )
