"""Configuration: flags over YAML over defaults, saved and read again, and all mistakes in one list."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from shardclip.errors import UserError
from shardclip.training import config, parsing
from shardclip.training.config import TrainConfig

SOURCE = ["--train-data", "shards/{000..099}.tar"]


def problems(argv: list[str]) -> list[str]:
    """The lines of the refusal of `argv`."""
    with pytest.raises(UserError) as caught:
        config.parse(argv)
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def test_flags_go_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "train_data: a.tar\noptimizer:\n  lr: 5e-5\n  beta1: 0.8\nbatch_size: 7\nlock-image: true\n"
    )
    parsed = config.parse(["--config", str(file), "--batch-size", "9"])
    assert parsed.optimizer.lr == 5e-5
    assert parsed.optimizer.beta1 == 0.8
    assert parsed.run.batch_size == 9
    assert parsed.lock.lock_image
    assert parsed.run.epochs == TrainConfig().run.epochs


def test_a_later_file_goes_over_an_earlier_one(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("train_data: a.tar\nseed: 1\nepochs: 2\n")
    second.write_text("seed: 3\n")
    parsed = config.parse([f"--config={first}", "--config", str(second)])
    assert (parsed.run.seed, parsed.run.epochs) == (3, 2)


def test_a_saved_configuration_is_read_back_the_same(tmp_path: Path) -> None:
    asked = config.parse(
        [
            *SOURCE,
            *("--lr", "3.3e-5", "--fsdp", "--fsdp-layers-to-wrap", "Block", "Res.*", "--no-async-save"),
            *("--image-mean", "0.1", "0.2", "0.3", "--aug-cfg", "scale=(0.9, 1.0)", "use_timm=True"),
            *("--name", "true", "--wandb-notes=--odd: 'notes' # é\nsecond line", "--csv-separator", "\t"),
        ]
    )
    config.save(asked, tmp_path / "config.yaml")
    assert config.parse(["--config", str(tmp_path / "config.yaml")]) == asked
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    names = {name.replace("_", "-") for concern in saved.values() for name in concern}
    assert names == set(parsing.flags(TrainConfig))


def test_a_mapping_is_written_as_open_clip_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train_data: a.tar\naug_cfg:\n  scale: [0.9, 1.0]\n  gray_scale_prob: 0.4\n")
    assert config.parse(["--config", str(file)]).data.augmentation() == {
        "scale": [0.9, 1.0],
        "gray_scale_prob": 0.4,
    }


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch_siz: 3\nrun:\n  epochs: [1, 2]\nlock_image: maybe\nseed: 1.5\n")
    flags = "--opt adamw --wram-up 3 --grad-clip-norm -1 --lr fast --resume latest"
    told = problems(["--config", str(file), *flags.split()])
    wanted = [
        f"{file}:1: batch_siz: no such setting; the nearest is --batch-size",
        f"{file}:3: epochs: ",
        f"{file}:4: lock_image: must be true or false, not 'maybe'",
        f"{file}:5: seed: ",
        "--wram-up: no such setting; the nearest is --warmup",
        "--lr: ",
        "--grad-clip-norm -1.0: must be above 0",
        "--train-data: nothing to train on",
        "--resume latest needs --name",
    ]
    missing = [text for text in wanted if not any(line.startswith(text) for line in told)]
    assert missing == []
    assert len(told) == len(wanted)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("a: [1\n", "is not YAML"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    assert any(line.startswith(str(file)) and message in line for line in problems(["--config", str(file)]))


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing yet\n")
    assert config.parse([*SOURCE, "--config", str(file)]) == config.parse(SOURCE)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lr"], "--lr: Missing value"),
        (["--warmup", "soon"], "--warmup: invalid literal for int() with base 10: 'soon'"),
        (["--lock-image", "True"], "--lock-image: does not take True"),
        (["--epochs", "3", "4"], "--epochs: does not take 4"),
        (["--epochs=3", "4"], "'4' follows a value that was given with '='"),
        (["loose", "--epochs", "3"], "'loose' stands before any flag"),
        (["--precision", "fp8"], "--precision: invalid choice 'fp8'"),
        (["--epochs", "0"], "--epochs 0: must be 1 or more"),
        (["--report-to", "tensorbord"], "'tensorbord' is none of tensorboard"),
        (["--logs", "none"], "a run always has a folder"),
    ],
)
def test_a_wrong_value_is_named(argv: list[str], message: str) -> None:
    told = problems([*SOURCE, *argv] if argv[0].startswith("--") else [*argv, *SOURCE])
    assert len(told) == 1
    assert message in told[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset-type", "synthetic"], "synthetic needs --train-num-samples"),
        (["--resume", "latest"], "--resume latest needs --name"),
        (["--keep-every", "100"], "--keep-every needs --keep-last"),
        (["--delete-previous-checkpoint", "--keep-last", "2"], "--keep-last 2"),
        (["--distill-model", "ViT-B-32"], "--distill-pretrained"),
        (["--lr-scheduler", "const-cooldown"], "needs --epochs-cooldown"),
        (
            ["--lr-scheduler", "const-cooldown", "--epochs", "2", "--epochs-cooldown", "3"],
            "longer than --epochs 2",
        ),
        (["--ddp", "--fsdp-cpu-offload", "--fsdp-min-params", "9"], "--fsdp-min-params, --fsdp-cpu-offload"),
        (["--device", "cpu", "--precision", "amp"], "--precision amp needs a GPU"),
        (["--lock-text-unlocked-layers", "2"], "--lock-text"),
    ],
)
def test_settings_that_contradict_each_other(argv: list[str], message: str) -> None:
    (line,) = problems([*SOURCE, *argv])
    assert message in line


def test_without_data_there_is_nothing_to_train_on() -> None:
    (line,) = problems([])
    assert line.startswith("--train-data: nothing to train on")


def test_defaults_are_written_once() -> None:
    parsed = config.parse(SOURCE)
    assert parsed == dataclasses.replace(
        TrainConfig(), data=dataclasses.replace(TrainConfig().data, train_data=SOURCE[1])
    )


PRESETS = sorted(config.PRESETS.glob("*.yaml"))


@pytest.mark.parametrize("preset", [path.stem for path in PRESETS])
def test_a_preset_is_a_run_that_only_lacks_its_data(preset: str) -> None:
    from open_clip import list_models

    parsed = config.parse(["--config", preset, *SOURCE, "--batch-size", "7"])
    assert parsed.run.batch_size == 7
    assert parsed.model.model in list_models()
    assert "# Source: " in (config.PRESETS / f"{preset}.yaml").read_text(encoding="utf-8")


def test_presets_keep_what_their_sources_say() -> None:
    assert len(PRESETS) == 9
    laion = config.parse(["--config", "laion400m-b32-86k", *SOURCE])
    assert laion.run.batch_size * 128 == 86016
    xlarge = config.parse(["--config=datacomp-xlarge", *SOURCE])
    assert xlarge.data.train_num_samples is not None
    assert xlarge.data.train_num_samples * xlarge.run.epochs == 12_800_000_000
    assert (xlarge.optimizer.lr, xlarge.optimizer.beta2, xlarge.optimizer.warmup) == (1e-3, 0.95, 10_000)
    # big_vision takes a share of the weights each step; here the share is the rate times the decay.
    for preset, share in (("siglip-b16", 1e-4), ("lit", 0.01)):
        optimizer = config.parse(["--config", preset, *SOURCE]).optimizer
        assert optimizer.lr * optimizer.wd == pytest.approx(share)
    lit = config.parse(["--config", "lit", *SOURCE])
    assert lit.data.train_num_samples is not None
    assert lit.data.train_num_samples * lit.run.epochs == 5_000 * 8 * lit.run.batch_size


def test_a_preset_or_file_that_is_not_there_names_the_presets() -> None:
    with pytest.raises(UserError, match=r"no such file, and the presets are .*datacomp-small"):
        config.parse(["--config", "datacomp-smal"])
