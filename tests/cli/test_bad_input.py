"""What bad input gets: one message that says what is wrong and what to do, and an exit code on every rank."""

import io
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from data.shards import write_tar
from launched import HANG_SECONDS
from PIL import Image

from commands import Finished, small_run

USERS_MISTAKE = [2, 2]


def jpeg(seed: int) -> bytes:
    """A picture of noise, so that its file is long enough to be cut."""
    file = io.BytesIO()
    Image.frombytes("RGB", (48, 48), random.Random(seed).randbytes(48 * 48 * 3)).save(file, "JPEG")
    return file.getvalue()


def refused(finished: Finished, *texts: str) -> None:
    """All ranks ended with code 2, and the message stands there once, without a stack trace."""
    assert finished.codes == USERS_MISTAKE, finished.said
    assert "Traceback" not in finished.said
    for text in texts:
        assert finished.said.count(text) == 1, finished.said


def test_wrong_flags_are_all_told_by_one_rank(tmp_path: Path) -> None:
    words = ["train", *small_run(tmp_path), "--lock-imag", "--precision", "fp8"]
    refused(Finished(tmp_path, words), "--lock-imag: no such setting; the nearest is --lock-image", "'fp8'")


def test_a_wrong_model_name_names_the_nearest(tmp_path: Path) -> None:
    words = ["train", *small_run(tmp_path)[2:], "--dataset-type", "synthetic", "--model", "ViT-B-33"]
    refused(Finished(tmp_path, words), "ViT-B-33", "ViT-B-32,")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    words = ["train", *small_run(tmp_path), "--train-data", str(tmp_path / "{00..03}.tar")]
    refused(Finished(tmp_path, words), f"no such shard: {tmp_path / '00.tar'}")


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize("flag", ["--val-data", "--imagenet-val", "--zeroshot-data"])
def test_evaluation_data_that_is_not_there_is_named_before_the_first_step(
    tmp_path: Path, flag: str, more: list[str]
) -> None:
    gone, picture = str(tmp_path / "gone.tar"), jpeg(0)
    members = [(f"{n}.{kind}", held) for n in range(32) for kind, held in (("jpg", picture), ("txt", b"a"))]
    shard = write_tar(tmp_path / "data" / "00.tar", members)
    finished = Finished(tmp_path, ["train", *small_run(tmp_path), "--train-data", shard, flag, gone, *more])
    refused(finished, gone)
    assert "Train Epoch" not in finished.said


def test_evaluation_data_that_is_never_read_may_be_missing(tmp_path: Path) -> None:
    gone = ["--imagenet-val", str(tmp_path / "gone"), "--zeroshot-frequency", "0"]
    words = ["train", *small_run(tmp_path), "--dataset-type", "synthetic", *gone]
    finished = Finished(tmp_path, words)
    assert finished.codes == [0, 0], finished.said


@pytest.mark.parametrize(
    ("held", "found"), [({"png": b"", "caption": b"a"}, "caption"), ({"txt": b"a", "bmp": b""}, "bmp")]
)
def test_shards_without_a_side_tell_what_they_hold_and_what_is_wanted(
    tmp_path: Path, held: dict[str, bytes], found: str
) -> None:
    members = [(f"{number}.{suffix}", content) for number in range(8) for suffix, content in held.items()]
    shard = write_tar(tmp_path / "data" / "00.tar", members)
    finished = Finished(tmp_path, ["train", *small_run(tmp_path), "--train-data", shard])
    refused(finished)
    assert found in finished.said
    assert "txt" in finished.said
    assert "jpg" in finished.said


def test_a_folder_that_holds_another_run_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "runs" / "first" / "config.yaml"
    other.parent.mkdir(parents=True)
    other.write_text("seed: 1\n")
    finished = Finished(tmp_path, ["train", *small_run(tmp_path), "--dataset-type", "synthetic"])
    refused(finished, f"{other.parent} holds a run already", "--resume latest")
    assert other.read_text() == "seed: 1\n"
    assert sorted(path.name for path in other.parent.iterdir()) == ["config.yaml"]


def test_a_truncated_picture_is_skipped_counted_and_named(tmp_path: Path) -> None:
    members = []
    for number in range(32):
        picture = jpeg(number)
        members += [
            (f"{number:03d}.jpg", picture[: len(picture) // 3] if number == 5 else picture),
            (f"{number:03d}.txt", b"noise"),
        ]
    shard = write_tar(tmp_path / "data" / "00.tar", members)
    words = ["train", *small_run(tmp_path), "--train-data", shard, "--train-num-samples", "64", "--debug"]
    finished = Finished(tmp_path, words)
    assert finished.codes == [0, 0], finished.said
    logs = finished.said + (tmp_path / "runs" / "first" / "logs" / "rank-1.log").read_text()
    assert re.search(r"left out \S*00\.tar\S*005: ", logs), logs
    assert "Traceback" not in finished.said


@pytest.mark.long
def test_b62_plain_torchrun_hands_our_flags_over(tmp_path: Path) -> None:
    words = ["train", *small_run(tmp_path), "--dataset-type", "synthetic", "--lock-imag"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    result = subprocess.run(
        [*command, "-m", "shardclip", *words], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert result.returncode != 0
    assert "ambiguous" not in result.stderr
    assert result.stderr.count("--lock-imag: no such setting; the nearest is --lock-image") == 1
