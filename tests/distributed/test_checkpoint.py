"""Checkpoints hold everything, under names that do not depend on how the model is wrapped or sharded."""

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import HANG_SECONDS
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from train_states import TINY, different, load_latest, open_checkpoints, resumed, state_of, step, whole

from shardclip.errors import UserError
from shardclip.models.factory import ModelSpec, build
from shardclip.training.checkpoint import CheckpointConfig, TrainState, published, read_state
from shardclip.training.checkpoint.config import to_prune
from shardclip.training.checkpoint.state import load_targets, to_plain, to_tensors
from shardclip.training.checkpoint.storage import PublishingWriter, SafeReader

ENGINES = [
    ("none", 1),
    ("ddp", 1),
    ("fsdp", 1),
    ("ddp", 2),
    ("fsdp", 2),
    ("hsdp", 2),
    ("ddp", 4),
    ("fsdp", 4),
    ("hsdp", 4),
]


def train_and_save(folder: Path, kind: str) -> float:
    """Three steps, a checkpoint, a reference copy beside it, and the loss of the next step."""
    state = state_of(kind)
    for number in range(3):
        step(state, seed=number)
    state.progress.update(samples_seen=12, loader={"stream": [1, 2]})
    checkpoints = open_checkpoints(folder)
    checkpoints.save(12, state)
    reference = whole(state)
    checkpoints.close()
    if checkpoints.rank == 0:
        torch.save(reference, folder / "reference.pt")
    return step(state, seed=3)


def load_each(folders: list[Path], kind: str) -> list[tuple[list[str], float, dict[str, Any]]]:
    """For each: the keys that differ from its reference, the loss of the next step, the progress."""
    state = state_of(kind)
    found = []
    for folder in folders:
        load_latest(folder, state)
        wrong = different(whole(state), torch.load(folder / "reference.pt"))
        found.append((wrong, step(state, seed=3), dict(state.progress)))
    return found


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, float]:
    """A checkpoint folder of each engine, and the loss of the step after."""
    folders = {(kind, world): tmp_path_factory.mktemp(f"{kind}{world}") for kind, world in ENGINES}
    return {
        folder: ranks(world).run(train_and_save, folder, kind)[0] for (kind, world), folder in folders.items()
    }


@pytest.mark.parametrize(("kind", "world"), ENGINES, ids=[f"{kind}{world}" for kind, world in ENGINES])
def test_b47_b14_every_checkpoint_resumes_under_every_engine(
    ranks: Any, saved: dict[Path, float], kind: str, world: int
) -> None:
    for per_rank in ranks(world).run(load_each, list(saved), kind):
        for (wrong, loss, progress), expected in zip(per_rank, saved.values(), strict=True):
            assert wrong == []
            assert loss == pytest.approx(expected, abs=1e-6)
            assert progress == {"samples_seen": 12, "loader": {"stream": [1, 2]}}


def share_to_load(folder: Path) -> float:
    """How much of a checkpoint's weights and moments this rank under FSDP makes room for."""
    path = open_checkpoints(folder).latest()
    assert path is not None
    targets = load_targets(state_of("fsdp"), SafeReader(path).tensors(), 0)
    own = [value.to_local() if isinstance(value, DTensor) else value for value in targets.values()]
    return sum(value.numel() for value in own) / sum(value.numel() for value in targets.values())


def test_b47_a_rank_loads_its_share_alone(ranks: Any, saved: dict[Path, float]) -> None:
    whole_model = next(iter(saved))
    # Scale, bias and random states are whole on all.
    for world, most in ((2, 0.6), (4, 0.4)):
        assert max(ranks(world).run(share_to_load, whole_model)) < most


def test_b14_the_scale_has_one_shape_and_its_moments_are_carried(saved: dict[Path, float]) -> None:
    for folder in saved:
        reference = torch.load(folder / "reference.pt")
        for name in ("logit_scale", "logit_bias"):
            moment = reference[f"optimizer.{name}.exp_avg"]
            assert reference[f"model.{name}"].shape == moment.shape == ()
            assert moment != 0


def test_b53_every_tensor_of_every_engine_loads_with_weights_only(saved: dict[Path, float]) -> None:
    for folder in saved:
        (path,) = published(folder)
        for place in SafeReader(path).read_metadata().storage_data.values():
            content = (path / place.relative_path).read_bytes()[place.offset :][: place.length]
            assert isinstance(torch.load(io.BytesIO(content), weights_only=True), torch.Tensor)


def keys_of(kind: str, flags: dict[str, Any]) -> set[str]:
    state = state_of(kind, **flags)
    if flags.get("grad_checkpointing"):  # and, besides ours, by torch's own wrapper
        blocks = getattr(state.model, "module", state.model).visual.transformer.resblocks
        if kind != "fsdp":
            blocks[0] = checkpoint_wrapper(blocks[0])
    step(state)
    return {key for key in to_tensors(state, 0) if not key.startswith("rng.")}


def test_b52_one_key_set_in_every_mode(ranks: Any) -> None:
    compiled = {"torchcompile": True, "torchcompile_backend": "eager"}
    modes = [{}, compiled, {"grad_checkpointing": True}]
    expected = {f"model.{name}" for name in build(TINY).state_dict()}
    moments = ("step", "exp_avg", "exp_avg_sq")
    expected |= {f"optimizer.{k.removeprefix('model.')}.{m}" for k in list(expected) for m in moments}
    for kind, world in (("none", 1), ("ddp", 2), ("fsdp", 2)):
        for flags in modes:
            assert ranks(world).run(keys_of, kind, flags)[0] == expected, (kind, flags)


def test_b52_another_model_is_told_in_a_few_lines(tmp_path: Path) -> None:
    train_and_save(tmp_path, "none")
    vision = TINY.model_cfg["vision_cfg"] | {"layers": 2, "patch_size": 4}
    other = build(ModelSpec("other", TINY.model_cfg | {"vision_cfg": vision}, {}))
    with pytest.raises(UserError, match="of another model") as caught:
        load_latest(tmp_path, TrainState(other, torch.optim.AdamW(other.parameters())))
    lines = str(caught.value).splitlines()
    assert len(lines) < 10
    assert "12 tensors only in this model: visual.transformer.resblocks.1." in lines[1]
    assert "visual.conv1.weight is (32, 3, 8, 8) there and (32, 3, 4, 4) here" in lines[2]


def locked_and_back(folder: Path, kind: str) -> dict[str, Any]:
    """Train all, resume with the image tower locked, resume with all again; the image tower's moments."""
    found: dict[str, Any] = {}
    for number, frozen in enumerate([None, "visual", None]):
        state = state_of(kind, frozen=frozen)
        load_latest(folder, state)
        tensors = whole(state)
        found[f"loaded {number}"] = {k: v for k, v in tensors.items() if k.startswith("optimizer.visual.")}
        step(state)
        checkpoints = open_checkpoints(folder)
        checkpoints.save(number, state)
        checkpoints.close()
        tensors = whole(state)
        found[f"saved {number}"] = {k: v for k, v in tensors.items() if k.startswith("optimizer.visual.")}
        found[f"text steps {number}"] = tensors["optimizer.text.ln_final.weight.step"].item()
    return found


@pytest.mark.parametrize(("kind", "world"), [("none", 1), ("fsdp", 2)])
def test_b48_moments_survive_a_locked_run(ranks: Any, tmp_path: Path, kind: str, world: int) -> None:
    found = ranks(world).run(locked_and_back, tmp_path, kind)[0]
    assert found["saved 0"]
    assert different(found["saved 0"], found["loaded 1"]) == []
    assert different(found["saved 0"], found["loaded 2"]) == []
    assert found["saved 2"]["optimizer.visual.proj.step"] == 2
    assert [found[f"text steps {number}"] for number in range(3)] == [1, 2, 3]


def test_b48_a_locked_start_unlocks_with_new_moments_that_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of("none", frozen="visual")
    step(state)
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.close()
    unlocked = state_of("none")
    with caplog.at_level("INFO"):
        load_latest(tmp_path, unlocked)
    assert "parameters start with new moments: visual." in caplog.text
    step(unlocked)
    assert whole(unlocked)["optimizer.visual.proj.step"] == 1
    assert whole(unlocked)["optimizer.text.ln_final.weight.step"] == 2


def before_the_first_step(folder: Path, kind: str) -> tuple[list[str], list[str]]:
    """Save before any step, and again after one without images; how the resumed runs differ after a step."""
    found = []
    for number, towers in enumerate([None, ("text",)]):
        state = state_of(kind)
        if towers is not None:
            step(state, towers=towers)
        checkpoints = open_checkpoints(folder)
        checkpoints.save(number, state)
        checkpoints.close()
        resumed = state_of(kind)
        load_latest(folder, resumed)
        step(state, seed=1)
        step(resumed, seed=1)
        found.append(different(whole(state), whole(resumed)))
    return found[0], found[1]


@pytest.mark.parametrize(("kind", "world"), [("none", 1), ("fsdp", 2)])
def test_a_tower_that_never_trained_resumes_at_step_0(
    ranks: Any, tmp_path: Path, kind: str, world: int
) -> None:
    assert ranks(world).run(before_the_first_step, tmp_path, kind) == [([], [])] * world


def save_after_an_evaluation(folder: Path) -> list[str]:
    """A forward without backward leaves FSDP's root gathered."""
    state = state_of("fsdp")
    step(state)
    expected = whole(state)
    with torch.no_grad():
        state.model(torch.zeros(1, 3, 16, 16), torch.zeros(1, 8, dtype=torch.int64))
    checkpoints = open_checkpoints(folder)
    checkpoints.save(4, state)
    checkpoints.close()
    resumed = state_of("fsdp")
    load_latest(folder, resumed)
    return different(expected, whole(resumed))


def test_saving_after_an_evaluation_under_fsdp(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(save_after_an_evaluation, tmp_path) == [[], []]


def snapshot_while_training_goes_on(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The writing waits until the weights have changed. Published names before and after; differences."""
    state = state_of("fsdp")
    step(state)
    checkpoints = open_checkpoints(folder)
    checkpoints.save(4, state)
    checkpoints.wait()
    changed = threading.Event()
    write = PublishingWriter.write_data

    def write_late(self: PublishingWriter, *args: Any) -> Any:
        assert changed.wait(HANG_SECONDS)
        return write(self, *args)

    PublishingWriter.write_data = write_late  # type: ignore[method-assign]
    try:
        expected = whole(state)
        checkpoints.save(8, state)
        step(state, seed=1)
        during = [path.name for path in published(folder)]
    finally:
        changed.set()
        checkpoints.close()
        PublishingWriter.write_data = write  # type: ignore[method-assign]
    name, loaded = resumed(folder, "fsdp")
    return during, [path.name for path in published(folder)], [str(name), *different(expected, loaded)]


def test_b49_a_background_save_holds_the_state_of_its_call(ranks: Any, tmp_path: Path) -> None:
    for during, after, outcome in ranks(2).run(snapshot_while_training_goes_on, tmp_path):
        assert during == ["samples-000000000004"]
        assert after == ["samples-000000000004", "samples-000000000008"]
        assert outcome == ["samples-000000000008"]


def draw_after_resume(folder: Path) -> tuple[list[float], list[float]]:
    """What each rank draws after saving, and after loading that."""
    import random

    import numpy as np

    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    state = state_of("ddp")
    torch.manual_seed(open_checkpoints(folder).rank)
    draw()
    checkpoints = open_checkpoints(folder)
    checkpoints.save(4, state)
    checkpoints.close()
    expected = draw()
    draw()
    load_latest(folder, state)
    return expected, draw()


def test_each_rank_gets_its_own_random_state_back(ranks: Any, tmp_path: Path) -> None:
    (first, first_resumed), (second, second_resumed) = ranks(2).run(draw_after_resume, tmp_path)
    assert first == first_resumed
    assert second == second_resumed
    assert first[0] != second[0]


class Average:
    """The least of an EMA: copies of the weights under their names, and a plain count."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        return {**self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        assert all(self.values[name] is state[name] for name in self.values)


def test_average_and_scaler_are_carried(tmp_path: Path) -> None:
    def fresh() -> TrainState:
        state = state_of("none")
        state.ema, state.scaler = Average(state.model), torch.amp.GradScaler("cpu", init_scale=64.0)
        return state

    state = fresh()
    assert isinstance(state.ema, Average)
    state.ema.updates = 3
    state.ema.values["logit_scale"].fill_(2.5)
    state.scaler.load_state_dict(state.scaler.state_dict() | {"scale": 8.0, "_growth_tracker": 2})
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(4, state)
    checkpoints.close()
    resumed = fresh()
    load_latest(tmp_path, resumed)
    assert resumed.ema.state_dict()["logit_scale"] == 2.5
    assert resumed.ema.state_dict()["updates"] == 3
    assert resumed.scaler.state_dict()["scale"] == 8.0
    assert resumed.scaler.state_dict()["_growth_tracker"] == 2


def test_an_average_that_was_not_saved_starts_from_the_loaded_weights(tmp_path: Path) -> None:
    state = state_of("none")
    step(state)
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(4, state)
    checkpoints.close()
    resumed = state_of("none")
    resumed.ema = Average(resumed.model)
    load_latest(tmp_path, resumed)
    assert different(resumed.ema.values, dict(state.model.state_dict())) == []


@pytest.mark.parametrize(
    "value", [torch.tensor(1), (1, 2), {1: 2}, Path("x")], ids=lambda v: type(v).__name__
)
def test_b53_only_plain_values_are_saved_and_others_are_named(value: Any) -> None:
    state = state_of("none")
    state.progress["loader"] = {"position": [0, value]}
    with pytest.raises(TypeError, match=r"progress\.loader\.position\[1\]"):
        to_plain(state)


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    state = state_of("none")
    state.progress.update(samples_seen=2**60, rate=0.1, name="é", streams=[[1, 2], []], none=None, flag=True)
    expected = dict(state.progress)
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(7, state)
    checkpoints.close()
    read = read_state(published(tmp_path)[0])
    assert read["progress"] == expected
    assert read["samples_seen"] == 7
    assert read["versions"]["torch"] == torch.__version__.partition("+")[0]


def test_old_ones_are_pruned_after_the_new_one_is_there(tmp_path: Path) -> None:
    state = state_of("none")
    checkpoints = open_checkpoints(tmp_path, keep_last=2, keep_every=20)
    for samples in (8, 16, 24, 32, 40, 48, 56):
        checkpoints.save(samples, state)
    checkpoints.close()
    assert [read_state(path)["samples_seen"] for path in published(tmp_path)] == [24, 40, 48, 56]
    assert list(tmp_path.glob("tmp-*")) == []


def test_what_is_kept_does_not_depend_on_when_one_prunes() -> None:
    saves = [7, 13, 20, 26, 33, 41, 47, 55, 61, 70]
    once = [samples for samples in saves if samples not in to_prune(saves, 2, 20)]
    kept: list[int] = []
    for samples in saves:
        kept.append(samples)
        kept = [other for other in kept if other not in to_prune(kept, 2, 20)]
    assert kept == once == [20, 41, 61, 70]
    assert to_prune(saves, None, 20) == []


def test_open_clips_names_for_keeping_are_the_same_two_settings() -> None:
    assert CheckpointConfig(delete_previous_checkpoint=True).resolved(100).keep_last == 1
    recent = CheckpointConfig(save_frequency=5, save_most_recent=True).resolved(100)
    assert (recent.save_frequency, recent.keep_last, recent.keep_every) == (1, 1, 500)
    assert CheckpointConfig().resolved(100) == CheckpointConfig()


def test_a_checkpoint_is_never_written_into_twice(tmp_path: Path) -> None:
    state = state_of("none")
    first = open_checkpoints(tmp_path)
    first.save(4, state)
    first.wait()
    (path,) = published(tmp_path)
    inode = path.stat().st_ino
    step(state)
    first.save(4, state)
    first.close()
    assert path.stat().st_ino == inode
    later_life = open_checkpoints(tmp_path)
    later_life.save(4, state)
    later_life.close()
    assert published(tmp_path) == [path]
    assert path.stat().st_ino != inode
    resumed = state_of("none")
    load_latest(tmp_path, resumed)
    assert different(whole(state), whole(resumed)) == []
