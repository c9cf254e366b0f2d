"""Checkpoints at a second place: published there as here, fetched when the first place is gone."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from launched import HANG_SECONDS, Launched
from train_states import different, load_latest, open_checkpoints, state_of, step, whole
from upath import UPath

from commands import small_run
from shardclip import cli
from shardclip.errors import UserError
from shardclip.training import distributed
from shardclip.training.checkpoint import CheckpointConfig, Checkpoints, published, storage
from shardclip.training.checkpoint.conflicts import conflicts
from shardclip.training.checkpoint.folders import RemoteFolder
from shardclip.training.checkpoint.remote import Mirror, RemoteConfig


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        yield f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    elif request.param == "file":
        yield f"file://{tmp_path}/second"
    else:
        yield "memory://runs/one"
        fsspec.filesystem("memory").rm("/runs", recursive=True)


def open_mirrored(folder: Path, url: str, **config: Any) -> Checkpoints:
    remote = RemoteConfig(remote_sync=url, remote_sync_patience=HANG_SECONDS)
    return Checkpoints(folder, CheckpointConfig(**config), distributed.current(), remote)


def test_a_run_whose_folder_is_lost_goes_on_from_the_second_place(tmp_path: Path, url: str) -> None:
    state = state_of("none")
    checkpoints = open_mirrored(tmp_path / "first", url, keep_last=2)
    for samples in (4, 8, 12):
        step(state, seed=samples)
        checkpoints.save(samples, state)
    checkpoints.close()
    assert RemoteFolder(url).published() == [path.name for path in published(tmp_path / "first")]
    assert RemoteFolder(url).begun() == set(RemoteFolder(url).published())
    elsewhere = open_mirrored(tmp_path / "new", url, resume="latest")
    path = elsewhere.to_resume()
    assert path == tmp_path / "new" / "samples-000000000012"
    resumed = state_of("none")
    elsewhere.load(path, resumed)
    elsewhere.close()
    assert different(whole(state), whole(resumed)) == []


def test_a_half_copied_one_is_not_there_and_a_damaged_one_is_passed_over(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of("none")
    checkpoints = open_mirrored(tmp_path / "first", url)
    for samples in (4, 8, 12):
        checkpoints.save(samples, state)
    checkpoints.close()
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/samples-000000000012/manifest.json")
    fs.pipe_file(f"{root}/samples-000000000008/state.json", b"{}")
    elsewhere = open_mirrored(tmp_path / "new", url, resume="latest")
    path = elsewhere.to_resume()
    elsewhere.close()
    assert path is not None
    assert path.name == "samples-000000000004"
    assert "samples-000000000008: not whole (state.json has 2 bytes" in caplog.text


def test_resuming_from_a_url(tmp_path: Path, bucket: str) -> None:
    state = state_of("none")
    step(state)
    url = f"{bucket}/{tmp_path.name}"
    checkpoints = open_mirrored(tmp_path / "first", url)
    checkpoints.save(4, state)
    checkpoints.close()
    here = open_checkpoints(tmp_path / "new", resume=f"{url}/samples-000000000004")
    path, resumed = here.to_resume(), state_of("none")
    assert path is not None
    here.load(path, resumed)
    assert different(whole(state), whole(resumed)) == []
    missing = open_checkpoints(tmp_path / "new", resume=f"{url}/samples-000000000005")
    with pytest.raises(UserError, match=r"not a whole checkpoint \(manifest.json is missing\)"):
        missing.to_resume()


# -- the folder itself by a URL


def test_a_folder_by_a_url_is_kept_as_one_on_a_disk(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of("none")
    checkpoints = open_checkpoints(url, keep_last=2)
    for samples in (4, 8, 12):
        step(state, seed=samples)
        checkpoints.save(samples, state)
    checkpoints.close()
    assert [path.name for path in published(UPath(url))] == ["samples-000000000008", "samples-000000000012"]
    assert RemoteFolder(url).begun() == set(RemoteFolder(url).published())
    resumed = state_of("none")
    assert load_latest(url, resumed) == UPath(url) / "samples-000000000012"
    assert different(whole(state), whole(resumed)) == []
    with pytest.raises(UserError, match=r"checkpoints of another run \(samples-000000000012\)"):
        open_checkpoints(url).to_resume()
    (UPath(url) / "samples-000000000012" / "state.json").write_bytes(b"{}")
    assert load_latest(url, resumed) == UPath(url) / "samples-000000000008"
    assert "samples-000000000012 is damaged (state.json has 2 bytes" in caplog.text
    again = open_checkpoints(url)
    again.save(12, resumed)  # in the place of the damaged one
    again.close()
    assert load_latest(url, state) == UPath(url) / "samples-000000000012"
    assert different(whole(state), whole(resumed)) == []


def save_there(environment: dict[str, str], url: str, samples: int, victim: int | None = None) -> Any:
    """Save from two ranks; rank 0 dies before the manifest is there, or rank 1 after its file."""
    os.environ.update(environment)
    checkpoints = open_checkpoints(url)
    state = state_of("fsdp")
    step(state, seed=samples)
    if victim is not None:
        # The other rank hears of the death, and would clear away what a kill of all ranks leaves.
        RemoteFolder.discard = lambda *_: None  # type: ignore[method-assign]
    if checkpoints.rank == victim == 0:
        RemoteFolder.publish = die  # type: ignore[method-assign]
    elif checkpoints.rank == victim == 1:
        storage.WriteResult = die  # type: ignore[assignment, misc]
    checkpoints.save(samples, state)
    checkpoints.close()
    return whole(state)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take_there(environment: dict[str, str], url: str) -> Any:
    os.environ.update(environment)
    state = state_of("fsdp")
    path = load_latest(url, state)
    return path and path.name, whole(state)


@pytest.mark.long
def test_b49_b50_kills_leave_the_previous_one_in_a_bucket(ranks: Any, tmp_path: Path, bucket: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    url = f"{bucket}/{tmp_path.name}"
    before = ranks(2).run(save_there, environment, url, 4)[0]
    for victim in (0, 1):
        # The other rank may be the first to be heard: its save has failed for want of the victim.
        with pytest.raises(
            AssertionError, match=r"the process died|Connection closed|reset by peer|not be saved"
        ):
            ranks(2).run(save_there, environment, url, 8, victim)
        assert RemoteFolder(url).begun() == {"samples-000000000004", "samples-000000000008"}
        for name, loaded in ranks(2).run(take_there, environment, url):
            assert name == "samples-000000000004"
            assert different(before, loaded) == []
        assert RemoteFolder(url).begun() == {"samples-000000000004"}
    alone = state_of("none")
    load_latest(url, alone)
    assert different(before, whole(alone)) == []


@pytest.mark.long
def test_a_run_keeps_its_checkpoints_in_a_bucket_and_is_exported_from_there(
    tmp_path: Path, bucket: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    url = f"{bucket}/{tmp_path.name}"
    words = ["train", *small_run(tmp_path), "--dataset-type", "synthetic", "--checkpoint-dir", url]
    for more in ([], ["--resume", "latest", "--epochs", "2", "--override"]):
        with Launched(tmp_path, [environment], cli.main, [*words, *more]) as run:
            assert run.end() == [0], run.all_said
    assert f"resumed {url}/samples-000000000016" in run.all_said
    assert RemoteFolder(url).published() == ["samples-000000000016", "samples-000000000032"]
    assert not (tmp_path / "runs" / "first" / "checkpoints").exists()
    written = []
    for source in (str(tmp_path / "runs" / "first"), url, f"{url}/samples-000000000032"):
        out = tmp_path / "model.safetensors"
        assert cli.main(["export", source, "--out", str(out)]) == 0
        written.append(out.read_bytes())
    assert written[0] == written[1] == written[2]


# -- the copy


class Stuck(RemoteFolder):
    """A store that does not answer."""

    def __init__(self) -> None:
        self.url = "stuck://"
        self.asked = threading.Event()

    def published(self) -> list[str]:
        self.asked.set()
        threading.Event().wait()
        raise AssertionError


def test_a_store_that_does_not_answer_does_not_hold_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote = Stuck()
    mirror = Mirror(tmp_path, remote)
    mirror.update()
    assert remote.asked.wait(HANG_SECONDS)
    assert not mirror.close(patience=0.0)
    assert "the run ends without" in caplog.text
    threads = [thread for thread in threading.enumerate() if thread.name == "remote-sync"]
    assert threads
    assert all(thread.daemon for thread in threads)


def test_a_copy_that_fails_is_reported_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/second"
    failures = iter([OSError("no route to host")])
    put = RemoteFolder.put

    def fail_once(self: RemoteFolder, checkpoint: Path) -> None:
        if error := next(failures, None):
            raise error
        put(self, checkpoint)

    monkeypatch.setattr(RemoteFolder, "put", fail_once)
    checkpoints = open_mirrored(tmp_path / "first", url)
    checkpoints.save(4, state_of("none"))
    checkpoints.close()
    assert "not copied: OSError: no route to host" in caplog.text
    later = open_mirrored(tmp_path / "first", url)
    later.close()
    assert RemoteFolder(url).published() == ["samples-000000000004"]


def settings(**changes: Any) -> dict[str, dict[str, Any]]:
    run = {"epochs": 2, "seed": 0, "batch_size": 8, "accum_freq": 1, "name": "a"}
    optimizer = {"lr": 1e-3, "wd": 0.2}
    return {
        "run": {name: changes.get(name, value) for name, value in run.items()},
        "optimizer": {name: changes.get(name, value) for name, value in optimizer.items()},
        "data": {"workers": changes.get("workers", 4)},
        "parallel": {"precision": changes.get("precision", "fp32")},
    }


def test_only_what_decides_the_learning_is_a_conflict() -> None:
    free = settings(name="b", workers=1, precision="bf16", batch_size=4)
    assert conflicts(settings(), 2, free, 4) == []
    assert conflicts(settings(), 2, settings(lr=5e-4, epochs=3), 4) == [
        "--epochs: 2 then, 3 now",
        "--lr: 0.001 then, 0.0005 now",
        "global batch: 16 then, 32 now (--batch-size 4 on 4 ranks keeps it)",
    ]


def test_a_changed_global_batch_names_what_keeps_it_on_these_ranks() -> None:
    def told(ranks: int, **changes: Any) -> list[str]:
        return conflicts(settings(batch_size=512), 8, settings(batch_size=512, **changes), ranks)

    assert told(4) == [
        "global batch: 4096 then, 2048 now (--batch-size 1024 or --accum-freq 2 on 4 ranks keeps it)"
    ]
    assert told(1)[0].endswith("(--batch-size 4096 or --accum-freq 8 on 1 rank keeps it)")
    assert told(3) == ["global batch: 4096 then, 1536 now"]


def test_other_settings_want_override_and_then_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def start(override: bool, **changes: Any) -> dict[str, Any]:
        state = state_of("none")
        state.progress["config"] = settings(**changes)
        config = CheckpointConfig(override=override)
        checkpoints = Checkpoints(tmp_path, config, distributed.current())
        path = checkpoints.latest()
        if path is None:
            checkpoints.save(4, state)
        else:
            checkpoints.load(path, state)
        checkpoints.close()
        return state.progress

    start(False)
    with pytest.raises(UserError, match=r"--lr: 0\.001 then, 0\.01 now\n.*--override"):
        start(False, lr=1e-2)
    assert start(True, lr=1e-2)["config"]["optimizer"]["lr"] == 1e-2
    assert "changed on resuming: --lr: 0.001 then, 0.01 now" in caplog.text
