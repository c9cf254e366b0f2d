"""Counting remote shards whose server falls silent."""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import HANG_SECONDS
from shards import SIZE, tokenize, write_shards

from shardclip.errors import UserError
from shardclip.training.data.config import DataConfig
from shardclip.training.data.counting import count_remote
from shardclip.training.data.image_input import ImageInput
from shardclip.training.data.loader import TrainLoader, merge_states, train_loader

COUNT = """
import sys
import webdataset.gopen  # loading it may take longer than the server is waited for
from shardclip.errors import UserError
from shardclip.training.data.config import DataConfig
from shardclip.training.data.counting import count_remote
try:
    count_remote(DataConfig(train_data=sys.argv[1], data_timeout=5.0))
except UserError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that sends headers, and then nothing."""
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                held.append(connection)
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    ("shards", "asked"),
    [("{}/0.tar", "{}/sizes.json"), ("pipe:curl -s {}/0.tar", "pipe:curl -s {}/0.tar")],
)
def test_silence_ends_the_counting_with_the_address(silent: str, shards: str, asked: str) -> None:
    config = DataConfig(train_data=shards.format(silent), data_timeout=0.5, data_retries=0)
    with pytest.raises(UserError) as caught:
        count_remote(config)
    assert f"nothing came of {asked.format(silent)} for 0.5 seconds (--data-timeout)" in str(caught.value)


def test_a_command_that_hangs_does_not_outlive_the_process(silent: str) -> None:
    """The output is at its end only when all that write to it have ended."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, f"pipe:exec curl -s {silent}/0.tar"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 1
    assert f"nothing came of pipe:exec curl -s {silent}/0.tar for 5 seconds" in done.stderr


def loader(data: str, train_num_samples: int | None = None) -> TrainLoader:
    config = DataConfig(train_data=data, train_num_samples=train_num_samples, workers=0, data_retries=0)
    return train_loader(config, ImageInput(size=SIZE), tokenize, batch_size=5, rank=0, world_size=1, seed=0)


def test_a_shard_that_cannot_be_counted_does_not_shorten_a_run_that_is_resumed(tmp_path: Path) -> None:
    write_shards(tmp_path, [10, 10, 10])
    data = f"pipe:cat {tmp_path}/{{00000..00002}}.tar"
    state = merge_states([loader(data).state_dict()])
    loader(data).load_state_dict(state)
    (tmp_path / "00001.tar").rename(tmp_path / "away.tar")
    with pytest.raises(
        UserError, match=r"30 samples were .*, and 20 now.* --train-num-samples 30 --override"
    ):
        loader(data).load_state_dict(state)
    told = loader(data, train_num_samples=30)
    told.load_state_dict(state)
    assert told.samples_per_epoch == 30


def test_an_epoch_of_no_samples_is_refused() -> None:
    with pytest.raises(UserError, match="--train-num-samples is 0: 1 or more"):
        DataConfig(train_data="0.tar", train_num_samples=0)
