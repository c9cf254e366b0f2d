"""From what a user wrote after --train-data to sources that give samples by number."""

from __future__ import annotations

import glob
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardclip.errors import UserError
from shardclip.training.data.config import DataConfig

log = logging.getLogger(__name__)

TABLES = (".csv", ".tsv", ".parquet")


@dataclass
class RawSample:
    """What a source holds of one sample, not decoded."""

    key: str
    """Where it came from: "shard.tar:key", "table.csv:line"."""
    parts: dict[str, bytes | NDArray[np.uint8]] = field(default_factory=dict)
    """Content by role ("image", "text", "json", "cls"); an image may be an array [H, W, 3] already."""
    again: bool = False
    """Whether it was met before, in an earlier epoch or an earlier turn of this one. (It goes by the order of
    the epochs: streams that stand a few samples apart do not change it.)"""
    problem: str | None = None
    """Why nothing could be read (a reason to count), None if all went well."""


class Source(Protocol):
    """A set of samples that can be read in any order: shard by number, sample by its number in the shard."""

    name: str
    """How messages call it."""
    shard_samples: NDArray[np.int64]
    """[shards] samples of each shard."""
    grain: int
    """Samples of one shard that are best read together (1: the order does not matter)."""

    def shard_name(self, shard: int) -> str:
        """How messages call a shard."""

    def locate(self, shard: int, samples: NDArray[np.int64]) -> list[object]:
        """What `fetch` needs to know of these samples of a shard; small, and made once a block."""

    def fetch(self, entry: object) -> RawSample:
        """Read one sample. What cannot be read is a `problem`, not an exception."""

    def found(self) -> str:
        """What the source offers (suffixes, columns), for the message that nothing of it is usable."""


def is_local(url: str) -> bool:
    """Whether a shard is a file of this machine (or a mounted one)."""
    return not re.match(r"^(pipe:|[A-Za-z][A-Za-z0-9+.-]+://)", url) or url.startswith("file://")


def is_tar(url: str) -> bool:
    """Whether a name is that of an uncompressed tar file, which can be read by seeking."""
    return url.endswith(".tar")


def is_table(url: str) -> bool:
    """Whether a name is that of a table of paths and captions."""
    return url.endswith(TABLES)


def expand(urls: str) -> list[list[str]]:
    """The shards or tables of each source (`::` between sources), in order.

    Raises:
        UserError: a source that names nothing that exists.
    """
    return [_expand_source(source.strip()) for source in urls.split("::") if source.strip()]


def _expand_source(source: str) -> list[str]:
    import braceexpand

    items = list(braceexpand.braceexpand(source)) if not source.startswith("pipe:") else _expand_pipe(source)
    shards: list[str] = []
    missing: list[str] = []
    for item in items:
        path = item.removeprefix("file://")
        if not is_local(item):
            shards.append(item)
        elif os.path.isdir(path):
            shards.extend(_shards_in(path))
        elif path.endswith((".txt", ".lst", ".list")) and os.path.isfile(path):
            for line in Path(path).read_text().splitlines():
                if line.strip() and not line.startswith("#"):
                    shards.extend(_expand_source(line.strip()))
        elif os.path.isfile(path):
            shards.append(path)
        elif matches := sorted(glob.glob(path)):
            shards.extend(matches)
        else:
            missing.append(path)
    if not shards:
        raise UserError(_no_such_shard(source, missing))
    if missing:
        log.warning(
            "%d of the %d shards of %s do not exist (the first: %s); training goes without them",
            len(missing),
            len(items),
            source,
            missing[0],
        )
    return shards


def _expand_pipe(source: str) -> list[str]:
    """A shell command has braces of its own: only numeric ranges `{000..099}` are expanded in it."""
    import braceexpand

    command = re.sub(r"\{(?!\d+\.\.\d+\})", r"\\{", source)
    return list(braceexpand.braceexpand(command))


def _shards_in(folder: str) -> list[str]:
    """The tar files of a folder, else of the folders in it, sorted."""
    here = sorted(str(path) for path in Path(folder).glob("*.tar"))
    return here or sorted(str(path) for path in Path(folder).glob("**/*.tar"))


def _no_such_shard(source: str, missing: list[str]) -> str:
    if not missing:
        return f"no such shard: {source} holds no .tar file."
    folder = os.path.dirname(missing[0]) or "."
    if not os.path.isdir(folder):
        return f"no such shard: {missing[0]} (the folder {folder} does not exist)."
    names = sorted(os.listdir(folder))
    held = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    return f"no such shard: {missing[0]} (the folder {folder} holds {held})."


def kind_of(shards: list[str], config: DataConfig) -> str:
    """Kind of a source: "tar" (read by seeking), "stream" (read from the front), "table" or "synthetic".

    Raises:
        UserError: a name tells no kind, or a table is not on this machine.
    """
    if config.dataset_type == "synthetic":
        return "synthetic"
    if config.dataset_type == "csv" or (config.dataset_type == "auto" and all(map(is_table, shards))):
        if remote := [table for table in shards if not is_local(table)]:
            raise UserError(
                f"the table {remote[0]} is not on this machine, and tables are read from files: copy it "
                "here, with the pictures that it names."
            )
        return "table"
    odd = [shard for shard in shards if is_local(shard) and not re.search(r"\.(tar|tar\.\w+|tgz)$", shard)]
    if odd and config.dataset_type == "auto":
        raise UserError(
            f"what is {odd[0]}? A .tar shard, a .csv, .tsv or .parquet table, a folder or a .txt list of "
            "shards is meant; --dataset-type says so where the name does not."
        )
    return "tar" if all(is_local(shard) and is_tar(shard) for shard in shards) else "stream"


def are_streams(listed: list[list[str]], config: DataConfig) -> bool:
    """Whether the sources of a training run are read from the front, as one of them can only be read so.

    Raises:
        UserError: another of them is a table, which has no such reading.
    """
    shard_of = {kind_of(shards, config): shards[0] for shards in listed}
    if {"table", "stream"} <= shard_of.keys():
        raise UserError(
            f"{shard_of['table']} is a table and {shard_of['stream']} can only be read from the front: a run "
            "cannot mix the two. Write the table's pairs as tar shards, or copy the shards to this machine, "
            "uncompressed."
        )
    return "stream" in shard_of


def open_source(
    shards: list[str], config: DataConfig, wanted: dict[str, tuple[str, ...]], first: int
) -> Source:
    """A source that can be read in any order, from its shards (see `kind_of`); `first` is the shard that a
    first start begins its index with.

    Raises:
        UserError: the source holds no sample.
    """
    kind = kind_of(shards, config)
    source: Source
    if kind in ("tar", "stream"):
        from shardclip.training.data.ranges import has_ranges
        from shardclip.training.data.tar import TarSource

        if front_only := [shard for shard in shards if not has_ranges(shard)]:
            raise UserError(
                f"{front_only[0]} can only be read from its front. Evaluation and `shardclip doctor` read by "
                "seeking: copy the shards to this machine, uncompressed."
            )
        source = tars = TarSource(shards, wanted, config.sample_key, first % len(shards))
        if tars.shard_samples.sum() and not tars.offers(whole=config.unpaired == "drop" or "cls" in wanted):
            raise UserError(f"no sample of {tars.name} can be used ({tars.found()}).")
    else:
        from shardclip.training.data.table import TableSource

        source = TableSource(shards, config, label="cls" in wanted)
    if not source.shard_samples.sum():
        raise UserError(f"{source.name} holds no sample ({source.found()}).")
    return source


def factors_of(config: DataConfig, sources: int) -> list[float]:
    """--train-data-upsampling-factors as one number for each source; 1 for each when not given."""
    text = config.train_data_upsampling_factors
    if text is None:
        return [1.0] * sources
    try:
        factors = [float(item) for item in text.split("::")]
    except ValueError:
        factors = []
    if len(factors) != sources or min(factors) < 0 or sum(factors) <= 0:
        raise UserError(
            f"--train-data-upsampling-factors {text!r} needs a number >= 0 for each of the {sources} sources "
            "of --train-data, joined by `::`, not all of them 0."
        )
    return factors
