"""Tables of paths and captions: separators, columns, empty cells, memory."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from shards import SIZE, numbers, picture, tokenize, write_shards

from shardclip.errors import UserError
from shardclip.training.data.config import DataConfig
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.loader import TrainLoader, train_loader
from shardclip.training.data.table import Column

SPEC = ImageInput(size=SIZE)


def table(folder: Path, captions: list[str], separator: str = ",", name: str = "data.csv") -> str:
    lines = [separator.join(("filepath", "title"))]
    for number, caption in enumerate(captions):
        (folder / f"{number}.png").write_bytes(picture(number))
        lines.append(f"{number}.png{separator}{caption}")
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / name)


def loader(data: str, batch_size: int, **settings: Any) -> TrainLoader:
    config = DataConfig(train_data=data, workers=0, **settings)
    return train_loader(
        config, SPEC, tokenize, batch_size=batch_size, rank=0, world_size=1, seed=0, streams=1
    )


@pytest.mark.parametrize(
    ("separator", "name"), [(",", "a.csv"), ("\t", "a.csv"), ("\t", "a.tsv"), (";", "a.csv")]
)
def test_b44_the_separator_is_found(tmp_path: Path, separator: str, name: str) -> None:
    one = loader(table(tmp_path, [f"picture {n}" for n in range(4)], separator, name), 4)
    batch = next(iter(one))
    assert sorted(numbers(batch)) == [0, 1, 2, 3]
    assert batch.texts.tolist() == tokenize([f"picture {n}" for n in numbers(batch)]).tolist()


def test_a_separator_is_one_character_or_a_tab_as_one_types_it(tmp_path: Path) -> None:
    data = table(tmp_path, ["picture 0"], "\t")
    assert sorted(numbers(next(iter(loader(data, 1, csv_separator="\\t"))))) == [0]
    for wrong in ("", ", ", "tab", "\\x"):
        with pytest.raises(UserError, match=r"--csv-separator is .*one character is meant, or .t for a tab"):
            DataConfig(csv_separator=wrong)


def test_b44_a_missing_column_is_told_with_columns_and_separator(tmp_path: Path) -> None:
    data = table(tmp_path, ["a"])
    with pytest.raises(UserError, match=r"no column 'caption'.*separator ','.*filepath, title"):
        loader(data, 1, csv_caption_key="caption")


def test_b44_empty_captions_are_dropped_and_counted(tmp_path: Path) -> None:
    captions = [f"picture {n}" for n in range(16)]
    captions[5] = ""
    one = loader(table(tmp_path, captions), 15)
    iterator = iter(one)
    batches = [next(iterator) for _ in range(2)]
    nan = tokenize(["nan"]).tolist()[0]
    for batch in batches:
        assert sorted(numbers(batch)) == [n for n in range(16) if n != 5]
        assert nan not in batch.texts.tolist()
    assert set().union(*(batch.skipped for batch in batches)) == {"empty caption"}


def test_quoted_cells_hold_separators_and_lines_and_a_missing_file_is_counted(tmp_path: Path) -> None:
    data = table(tmp_path, ['"a, b"', '"two\nlines"', "plain"])
    with open(data, "a", encoding="utf-8") as file:
        file.write("gone.png,lost\n")
    iterator = iter(loader(data, 3, max_skip_rate=1.0))
    batches = [next(iterator) for _ in range(2)]
    expected = tokenize(["a, b", "two\nlines", "plain"])
    for batch in batches:
        assert batch.texts.tolist() == expected[numbers(batch)].tolist()
    assert set().union(*(batch.skipped for batch in batches)) == {"image file cannot be read"}


def test_a_quote_that_is_not_closed_is_told_with_its_line(tmp_path: Path) -> None:
    """Else the rest of the table would be one caption."""
    data = table(tmp_path, ["plain", '"two\nlines"', '"Broken quote', "plain", "plain"])
    with pytest.raises(UserError, match=r"data\.csv: a quote in the row that begins in line 5 is not closed"):
        loader(data, 1)


def test_quotes_within_a_cell_are_text_and_the_last_line_needs_no_end(tmp_path: Path) -> None:
    data = Path(table(tmp_path, ['a 5" nail', '"so"called', '"whole"']))
    data.write_bytes(data.read_bytes().rstrip())
    batch = next(iter(loader(str(data), 3)))
    expected = tokenize(['a 5" nail', "socalled", "whole"])
    assert batch.texts.tolist() == expected[numbers(batch)].tolist()


def test_a_table_that_is_not_on_this_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"memory://b/x\.csv is not on this machine.*copy it here"):
        loader("memory://b/x.csv", 1)


def test_a_table_beside_a_stream_is_refused(tmp_path: Path) -> None:
    """The stream's reading would take the table for a tar, and leave it out."""
    data = table(tmp_path, ["a"])
    write_shards(tmp_path / "shards", [4])
    with pytest.raises(UserError, match=r"data\.csv is a table and pipe:cat .* cannot mix"):
        loader(f"{data}::pipe:cat {tmp_path}/shards/00000.tar", 1, train_num_samples=4)
    assert loader(f"{data}::{tmp_path}/shards", 1).samples_per_epoch == 5


def test_parquet_reads_as_csv_does(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    columns = {"filepath": [f"{n}.png" for n in range(4)], "title": ["a", None, "c", "d"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    batch = next(iter(loader(str(tmp_path / "a.parquet"), 3)))
    assert sorted(numbers(batch)) == [0, 2, 3]


def test_b45_a_table_is_few_objects_however_long_it_is() -> None:
    """Python objects are what forked readers copy page by page as their reference counts are written."""
    gc.collect()
    before = len(gc.get_objects())
    column = Column(f"path/to/picture {row}.jpg" for row in range(200_000))
    assert len(gc.get_objects()) - before < 50
    assert len(column) == 200_000
    assert [column[row] for row in (0, 99_999, 199_999)] == [
        f"path/to/picture {row}.jpg".encode() for row in (0, 99_999, 199_999)
    ]


@pytest.mark.long
def test_b45_the_memory_of_readers_is_flat(tmp_path: Path) -> None:
    """2,000 steps of two workers over a table of 200,000 rows."""
    for number in range(64):
        (tmp_path / f"{number}.jpg").write_bytes(picture(number, (64, 64), "JPEG"))
    lines = [f"{row % 64}.jpg,picture {row} of the table" for row in range(200_000)]
    (tmp_path / "data.csv").write_text("\n".join(["filepath,title", *lines]))
    config = DataConfig(train_data=str(tmp_path / "data.csv"), workers=2)
    before = children()
    one = train_loader(config, SPEC, tokenize, batch_size=8, rank=0, world_size=1, seed=0, streams=2)
    batches = iter(one)
    for _ in range(200):
        next(batches)
    workers = children() - before
    early = [resident_bytes(pid) for pid in workers]
    for _ in range(1800):
        next(batches)
    late = [resident_bytes(pid) for pid in workers]
    one.close()
    assert len(workers) == 2
    assert all(after < 1.05 * then for then, after in zip(early, late, strict=True))


def children() -> set[int]:
    """Processes that this one has started."""
    return {
        int(pid)
        for thread in Path("/proc/self/task").iterdir()
        for pid in (thread / "children").read_text().split()
    }


def resident_bytes(pid: int) -> int:
    """Resident memory of a running process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
