"""Tables of image paths and captions (CSV, TSV, Parquet), and synthetic pictures."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from shardclip.errors import UserError
from shardclip.training.data.config import DataConfig
from shardclip.training.data.sources import RawSample


class Column:
    """Many strings in two arrays. (A list of strings would be copied, page by page, into every reading
    process, as reference counts are written.)"""

    def __init__(self, values: Iterator[str | None]) -> None:
        self._text = bytearray()
        ends = np.zeros(1024, dtype=np.int64)
        self._length = 0
        for value in values:
            self._text += (value or "").encode("utf-8", "surrogateescape")
            if self._length == len(ends):
                ends = np.concatenate([ends, np.zeros_like(ends)])
            ends[self._length] = len(self._text)
            self._length += 1
        self._ends = ends[: self._length].copy()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> bytes:
        start = int(self._ends[row - 1]) if row else 0
        return bytes(self._text[start : int(self._ends[row])])


class TableSource:
    """Rows of a table: a path and a caption (or a class number)."""

    grain = 1

    def __init__(self, tables: list[str], config: DataConfig, label: bool = False) -> None:
        self.name = tables[0] if len(tables) == 1 else f"{tables[0]} .. {os.path.basename(tables[-1])}"
        self.tables = tables
        self._role = "cls" if label else "text"
        self._names = (config.csv_img_key, config.csv_label_key if label else config.csv_caption_key)
        columns = [_columns(table, self._names, config.csv_delimiter) for table in tables]
        self._paths = [paths for paths, _ in columns]
        self._texts = [texts for _, texts in columns]
        self.shard_samples = np.array([len(paths) for paths in self._paths], dtype=np.int64)

    def shard_name(self, shard: int) -> str:
        """The path of a table."""
        return self.tables[shard]

    def locate(self, shard: int, samples: NDArray[np.int64]) -> list[object]:
        """(table, row) pairs."""
        return [(shard, int(sample)) for sample in samples]

    def fetch(self, entry: object) -> RawSample:
        """Read a row's image file."""
        assert isinstance(entry, tuple)
        table, row = entry
        raw = RawSample(f"{os.path.basename(self.tables[table])}:{row + 1}")
        raw.parts[self._role] = self._texts[table][row]
        path = os.fsdecode(self._paths[table][row])
        if path:
            try:
                with open(os.path.join(os.path.dirname(self.tables[table]), path), "rb") as file:
                    raw.parts["image"] = file.read()
            except OSError:
                raw.problem = "image file cannot be read"
        return raw

    def found(self) -> str:
        """The columns that were read."""
        return f"columns read: {self._names[0]}, {self._names[1]}"


class SyntheticSource:
    """Pictures of one random colour, each with a caption that tells its number."""

    grain = 1
    name = "synthetic data"

    def __init__(self, samples: int, size: tuple[int, int], label: bool = False) -> None:
        self.shard_samples = np.array([samples], dtype=np.int64)
        self._size = size
        self._label = label

    def shard_name(self, shard: int) -> str:
        """There is only one."""
        return self.name

    def locate(self, shard: int, samples: NDArray[np.int64]) -> list[object]:
        """The samples' numbers."""
        return [int(sample) for sample in samples]

    def fetch(self, entry: object) -> RawSample:
        """Make a picture [H, W, 3] uint8 and its caption."""
        assert isinstance(entry, int)
        colour = np.array([entry * 37 % 256, entry * 91 % 256, entry * 151 % 256], dtype=np.uint8)
        picture = np.broadcast_to(colour, (*self._size, 3))
        other = {"cls": str(entry % 10).encode()} if self._label else {"text": f"picture {entry}".encode()}
        return RawSample(f"synthetic:{entry}", {"image": picture, **other})

    def found(self) -> str:
        """Nothing that a user could mistake."""
        return f"{int(self.shard_samples[0])} samples"


def _columns(table: str, names: tuple[str, str], separator: str | None) -> tuple[Column, Column]:
    """The two named columns of a table."""
    if table.endswith(".parquet"):
        return _parquet_columns(table, names)
    with open(table, newline="", encoding="utf-8", errors="surrogateescape") as file:
        header = file.readline()
    found = separator or _separator(header, names, tab=table.endswith(".tsv"))
    csv.field_size_limit(2**27)
    header_row = next(csv.reader([header.lstrip("\ufeff").rstrip("\r\n")], delimiter=found), [])
    places = [_place(name, header_row, table, found) for name in names]
    return _read_column(table, found, places[0]), _read_column(table, found, places[1])


def _separator(header: str, names: tuple[str, str], tab: bool) -> str:
    """The separator with which the header line holds both columns; tab or comma if none does."""
    for candidate in "\t,;|":
        if set(names) <= set(next(csv.reader([header.strip("\ufeff\r\n")], delimiter=candidate), [])):
            return candidate
    return "\t" if tab or "\t" in header else ","


def _place(name: str, header: list[str], table: str, separator: str) -> int:
    if name not in header:
        raise UserError(
            f"{table} has no column {name!r}. With the separator {separator!r} its columns are: "
            f"{', '.join(header)}. Name the columns with --csv-img-key, --csv-caption-key (--csv-label-key), "
            "the separator with --csv-separator."
        )
    return header.index(name)


def _read_column(table: str, separator: str, place: int) -> Column:
    with open(table, newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = _rows(file, table, separator)
        return Column(row[place] if place < len(row) else None for row in rows)


def _rows(file: TextIO, table: str, separator: str) -> Iterator[list[str]]:
    """The rows after the header, blank ones left out.

    Raises:
        UserError: a quote is not closed, which makes one cell of all that follows it.
    """
    ended = False

    def lines() -> Iterator[str]:
        nonlocal ended
        yield from file
        ended = True

    rows = csv.reader(lines(), delimiter=separator)
    begin = 1
    try:
        for row in rows:
            if ended:  # csv asks for a line after the last one within a row only if a quote is open
                raise csv.Error("the file ends inside it")
            if row and begin > 1:
                yield row
            begin = rows.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{table}: a quote in the row that begins in line {begin} is not closed ({error}). Close it, or, "
            'if it belongs to the text, quote the whole cell and double it: "a ""quoted"" word".'
        ) from error


def _parquet_columns(table: str, names: tuple[str, str]) -> tuple[Column, Column]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f"reading {table} needs pyarrow: pip install pyarrow.") from error
    file = parquet.ParquetFile(table)
    for name in names:
        _place(name, list(file.schema_arrow.names), table, "none (Parquet)")
    return _parquet_column(file, names[0]), _parquet_column(file, names[1])


def _parquet_column(file: Any, name: str) -> Column:
    batches = file.iter_batches(columns=[name])
    return Column(
        None if value is None else str(value) for batch in batches for value in batch[name].to_pylist()
    )
