"""Shards read from their front: pipes, http, fsspec, compressed; cut, missing and slow ones; resuming."""

import gzip
import http.server
import io
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from shards import SIZE, numbers, picture, sample, tokenize, write_shards, write_tar

from shardclip.errors import UserError
from shardclip.training.data import remote
from shardclip.training.data.config import DataConfig
from shardclip.training.data.counting import count_remote, total
from shardclip.training.data.doctor import bytes_of
from shardclip.training.data.doctor import main as doctor
from shardclip.training.data.finite import pairs
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.loader import TrainLoader, merge_states, train_loader
from shardclip.training.data.remote import RemoteShard, open_stream

SPEC = ImageInput(size=SIZE)
WANTED = {"image": ("png",), "text": ("txt",)}


def loader(data: str, streams: int, rank: int = 0, world: int = 1, **settings: Any) -> TrainLoader:
    settings = {"workers": 0, "data_retries": 0, "train_num_samples": 60, **settings}
    config = DataConfig(train_data=data, **settings)
    return train_loader(
        config, SPEC, tokenize, batch_size=12 // world, rank=rank, world_size=world, seed=0, streams=streams
    )


def read(loaders: list[TrainLoader], steps: int) -> list[list[int]]:
    iterators = [iter(one) for one in loaders]
    return [
        list(itertools.chain.from_iterable(numbers(next(iterator)) for iterator in iterators))
        for _ in range(steps)
    ]


@pytest.fixture
def piped(tmp_path: Path) -> str:
    """Six shards of ten samples each, through a command."""
    write_shards(tmp_path, [10] * 6)
    return f"pipe:cat {tmp_path}/{{00000..00005}}.tar"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address of a server of the test's folder, which cuts `cut.tar` short."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self) -> None:
            if not self.path.endswith("cut.tar"):
                return super().do_GET()
            content = Path(tmp_path, "cut.tar").read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def after_its_end(stream: Any) -> Any:
    """The output of a command that has ended; it must fit into a pipe."""
    stream.pipe.proc.wait()
    return stream


def test_shards_are_dealt_whole_and_an_epoch_is_all_of_them(piped: str) -> None:
    batches = read([loader(piped, 3)], 10)
    for epoch in (batches[:5], batches[5:]):
        assert sorted(itertools.chain.from_iterable(epoch)) == list(range(60))
    assert batches[:5] != batches[5:]


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (3, 0), (3, 1)])
def test_ranks_and_workers_change_nothing(piped: str, world: int, workers: int) -> None:
    ranks = [loader(piped, 3, rank, world, workers=workers) for rank in range(world)]
    assert read(ranks, 4) == read([loader(piped, 3)], 4)
    for one in ranks:
        one.close()


@pytest.mark.parametrize("stop", [1, 5, 7])
def test_a_restart_goes_on_where_it_stopped(piped: str, stop: int) -> None:
    reference = read([loader(piped, 3)], 12)
    first = [loader(piped, 3, rank, 3) for rank in range(3)]
    read(first, stop)
    state = json.loads(json.dumps(merge_states([one.state_dict() for one in first])))
    again = loader(piped, 3)
    again.load_state_dict(state)
    assert read([again], 12 - stop) == reference[stop:]


def test_fewer_shards_than_streams_are_split_inside_and_said_so(tmp_path: Path, caplog: Any) -> None:
    write_shards(tmp_path, [24, 24])
    data = f"pipe:cat {tmp_path}/{{00000..00001}}.tar"
    batches = read([loader(data, 6)], 4)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(48))
    assert "each shard is read 3 times an epoch" in caplog.text


def test_http_and_compressed_and_fsspec_give_the_same(tmp_path: Path, web: str) -> None:
    write_shards(tmp_path, [12])
    content = (tmp_path / "00000.tar").read_bytes()
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(content))
    with fsspec.open("memory://bucket/0.tar", "wb") as file:
        file.write(content)
    seen = [
        read([loader(data, 1)], 2)
        for data in (f"{web}/00000.tar", str(tmp_path / "0.tar.gz"), "memory://bucket/0.tar")
    ]
    assert sorted(seen[0][0]) == list(range(12))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("ended", [False, True])
def test_a_cut_connection_is_noticed_tried_again_and_counted(
    tmp_path: Path, web: str, caplog: Any, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """The same samples arrive whether curl has failed before the first byte is read or goes on meanwhile.

    The cut lies inside the twelfth, of which no more than the .json is missing.
    """
    write_tar(tmp_path / "cut.tar", [member for n in range(20) for member in sample(n)])
    if ended:
        monkeypatch.setattr(remote, "open_stream", lambda url: after_its_end(open_stream(url)))
    shard = RemoteShard(f"{web}/cut.tar", WANTED, "first-dot", retries=1, pause=0)
    found = list(shard.samples())
    assert [raw.key for raw in found[:-1]] == [f"cut.tar:{n:06d}" for n in range(11)]
    assert found[-1].problem == "shard cannot be read to its end"
    assert "attempt 2 of 2" in caplog.text


def test_a_shard_cut_between_members_is_noticed(tmp_path: Path) -> None:
    """Without its end mark a tar looks whole to tarfile."""
    write_shards(tmp_path, [4])
    shard = RemoteShard(f"pipe:head -c 9216 {tmp_path}/00000.tar", WANTED, "first-dot", retries=0)
    assert next(reversed(list(shard.samples()))).problem == "shard cannot be read to its end"


class NoCredentials(Exception):
    """A client's own error, as botocore has them."""


@pytest.mark.parametrize("error", [OSError, NoCredentials])
def test_a_failure_in_the_middle_repeats_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    write_shards(tmp_path, [20])
    path = tmp_path / "00000.tar"
    failures = iter([15_000, 30_000])

    class Failing:
        def __init__(self) -> None:
            self.file = io.BytesIO(path.read_bytes())
            self.left = next(failures, 10**9)

        def read(self, size: int = -1) -> bytes:
            self.left -= size
            if self.left < 0:
                raise error("connection lost")
            return self.file.read(size)

        def close(self) -> None:
            self.file.close()

    monkeypatch.setattr(remote, "open_stream", lambda url: Failing())
    found = list(RemoteShard("s3://somewhere/0.tar", WANTED, "first-dot", retries=2, pause=0).samples())
    assert [raw.key for raw in found] == [f"0.tar:{n:06d}" for n in range(20)]


def test_missing_shards_end_the_run_with_the_address(web: str) -> None:
    with pytest.raises(UserError, match=r"3 remote shards in a row could not be read.*/0000\d\.tar.*exit 22"):
        read([loader(f"{web}/{{00000..00009}}.tar", 1)], 1)


@pytest.mark.parametrize("command", ["cat", "exec cat"])
def test_a_command_whose_beginning_is_enough_has_not_failed(tmp_path: Path, command: str) -> None:
    """Some shells become the command, so that it is itself that a closed pipe ends."""
    (tmp_path / "large.tar").write_bytes(bytes(2**20))
    assert bytes_of(f"pipe:{command} {tmp_path}/large.tar") == -1
    assert "exit 3" in str(bytes_of("pipe:exit 3"))


def test_the_number_of_samples_is_read_beside_the_shards_or_counted(
    tmp_path: Path, web: str, caplog: Any, capsys: Any
) -> None:
    write_shards(tmp_path, [3, 4])
    data = f"{web}/{{00000..00001}}.tar"
    assert loader(data, 1, train_num_samples=None).samples_per_epoch == 7
    assert "7 samples were counted by reading 2 remote shards" in caplog.text
    assert "counting remote shards" in capsys.readouterr().out
    caplog.clear()
    (tmp_path / "__len__").write_text("9")
    assert loader(data, 1, train_num_samples=None).samples_per_epoch == 9
    for shard, count in enumerate((3, 4)):
        (tmp_path / f"0000{shard}_stats.json").write_text(json.dumps({"count": 9, "successes": count}))
    assert loader(data, 1, train_num_samples=None).samples_per_epoch == 7
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 3, "00001.tar": 5}))
    assert loader(data, 1, train_num_samples=None).samples_per_epoch == 8
    assert "counted by reading" not in caplog.text
    twice = loader(
        f"{web}/00000.tar::{web}/00001.tar", 1, train_num_samples=None, train_data_upsampling_factors="2::0.4"
    )
    assert twice.samples_per_epoch == 8


def test_ranks_share_the_counting_and_a_shard_that_fails_is_left_out_of_it(
    tmp_path: Path, web: str, caplog: Any
) -> None:
    """Five shards, one missing and one cut, over two ranks; a sample is members of one key in a row."""
    write_shards(tmp_path, [3, 4, 5])
    write_tar(tmp_path / "cut.tar", [member for n in range(9) for member in sample(n)])
    (tmp_path / "names.txt").write_text(
        "\n".join(f"{web}/{name}.tar" for name in ("00000", "00001", "cut", "gone", "00002"))
    )
    config = DataConfig(train_data=str(tmp_path / "names.txt"), data_retries=0)
    shares = [count_remote(config, rank, 2) for rank in range(2)]
    assert [share.samples for share in shares if share] == [(8,), (4,)]
    assert total([share for share in shares if share]) == [12]
    assert f"{web}/cut.tar is left out of the count" in caplog.text
    assert f"{web}/gone.tar is left out of the count" in caplog.text
    assert count_remote(DataConfig(train_data=str(tmp_path))) is None


def test_an_epoch_of_nothing_is_told(web: str) -> None:
    with pytest.raises(UserError, match="no sample of the remote shards could be counted"):
        _ = loader(f"{web}/00000.tar", 1, train_num_samples=None).samples_per_epoch


def test_s3_is_read_counted_and_looked_at(tmp_path: Path, bucket: str, capsys: Any) -> None:
    """moto's server on loopback; the worker is forked after this process has spoken to it."""
    write_shards(tmp_path, [8, 4])
    place = f"{bucket}/{tmp_path.name}"
    fsspec.filesystem("s3").put(f"{tmp_path}/*.tar", f"{place}/")
    data = f"{place}/{{00000..00001}}.tar"
    one = loader(data, 1, workers=1, train_num_samples=None)
    assert one.samples_per_epoch == 12
    batches = read([one], 2)
    one.close()
    assert [sorted(batch) for batch in batches] == [list(range(12))] * 2
    seen = [
        number
        for rank in range(2)
        for batch in pairs(
            DataConfig(val_data=data, workers=1), SPEC, tokenize, batch_size=5, rank=rank, world_size=2
        )
        for number in numbers(batch)
    ]
    assert seen == list(range(12))
    capsys.readouterr()
    assert doctor([data, "--sheet", str(tmp_path / "sheet.png")]) == 0
    assert "12, of which 12 were looked at" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "sheet.png").exists()


def test_validation_data_that_has_no_ranges_is_refused_with_what_to_do(tmp_path: Path, web: str) -> None:
    """The server of these tests sends whole files only."""
    write_shards(tmp_path, [4])
    for data in (f"{web}/00000.tar", f"pipe:cat {tmp_path}/00000.tar"):
        config = DataConfig(val_data=data)
        with pytest.raises(UserError, match="copy the shards"):
            pairs(config, SPEC, tokenize, batch_size=2, rank=0, world_size=1)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(("suffix", "said"), [("outputs.txt", "no sample"), ("txt", "no image")])
def test_b33_remote_shards_without_a_usable_sample_list_suffixes(
    tmp_path: Path, suffix: str, said: str, counted: bool
) -> None:
    """There is no member of a wanted suffix, or none but the captions."""
    for shard in range(2):
        members = [(f"{n}.{kind}", b"x") for n in range(60) for kind in ("input.png", suffix)]
        write_tar(tmp_path / f"{shard}.tar", members)
    settings = {"train_num_samples": None if counted else 60, "max_skip_rate": 1.0}
    with pytest.raises(UserError, match=rf"{said} .*found: input\.png, {suffix}; suffixes wanted"):
        read([loader(f"pipe:cat {tmp_path}/{{0..1}}.tar", 1, **settings)], 1)


def test_an_empty_shard_among_others_stops_nothing(tmp_path: Path) -> None:
    """Each of two streams gets the empty shard several times."""
    write_shards(tmp_path, [6, 0])
    batches = read([loader(f"pipe:cat {tmp_path}/{{00000..00001}}.tar", 2)], 10)
    assert set(itertools.chain.from_iterable(batches)) == set(range(6))


def test_b41_the_end_of_a_shard_is_no_sample(tmp_path: Path) -> None:
    """Three shards, two epochs: the same ids with and without the marker that webdataset 1 puts at an end."""
    write_shards(tmp_path, [4, 4, 4])
    batches = read([loader(f"pipe:cat {tmp_path}/{{00000..00002}}.tar", 1)], 2)
    assert [sorted(batch) for batch in batches] == [list(range(12))] * 2


def test_img2datasets_output_is_read_as_it_is(tmp_path: Path, web: str, caplog: Any) -> None:
    """Shards 0, 1 and 3 (2 was not made), keys with gaps where a download failed, a Parquet table and counts
    beside each; by folder, by range, and over http."""
    numbered = iter(range(100))
    for shard, kept in ((0, (0, 2, 5)), (1, (1, 3)), (3, (0, 1, 2, 9))):
        members = []
        for place in kept:
            number, key = next(numbered), f"{shard:05d}{place:04d}"
            record = {
                **{"caption": f"number {number}", "url": f"http://host/{key}.jpg", "key": key},
                **{"status": "success", "error_message": None, "width": 8, "height": 8, "exif": "{}"},
            }
            for suffix, content in (
                ("jpg", picture(number, format="PNG")),
                ("json", json.dumps(record).encode()),
                ("txt", f"number {number}".encode()),
            ):
                members.append((f"{key}.{suffix}", content))
        write_tar(tmp_path / f"{shard:05d}.tar", members)
        stats = {"count": 10, "successes": len(kept), "failed_to_download": 10 - len(kept), "status_dict": {}}
        (tmp_path / f"{shard:05d}_stats.json").write_text(json.dumps(stats))
        (tmp_path / f"{shard:05d}.parquet").write_bytes(b"PAR1")
    names = ["00000", "00001", "00003"]
    remote_range = "::".join(f"{web}/{name}.tar" for name in names)
    for data in (str(tmp_path), f"{tmp_path}/{{00000..00003}}.tar", remote_range):
        for key in (None, "caption"):
            one = loader(data, 1, train_num_samples=None, json_text_key=key)
            assert one.samples_per_epoch == 9
            seen, texts = [], {}
            for batch in itertools.islice(iter(one), 3):
                seen += numbers(batch)
                texts |= dict(zip(numbers(batch), batch.texts.tolist(), strict=True))
            assert [sorted(seen[start : start + 9]) for start in (0, 9, 18, 27)] == [list(range(9))] * 4
            assert texts == {n: tokenize([f"number {n}"]).tolist()[0] for n in range(9)}
    assert "1 of the 4 shards" in caplog.text
    assert "counted by reading" not in caplog.text
