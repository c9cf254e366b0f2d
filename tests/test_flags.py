"""Names people know: each flag of open_clip's is accepted or answered, and none of ours trips torchrun."""

import argparse
import ast
import dataclasses
import inspect
import logging
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from shardclip import cli
from shardclip.errors import UserError
from shardclip.launch import split_launch_flags
from shardclip.training import compatibility, config, parsing

OURS = parsing.flags(config.TrainConfig)
WITH_LAUNCH = parsing.flags(config.TrainCommand)

MAIN_ONLY = """
image-key text-key json-text-key json-text-key-probs max-image-pixels length-bucketing bucket-pool
bucket-chunk bucket-prefetch-pools text-pad-multiple text-pooler-own-group opt-kwargs opt-fallback-list
text-layer-decay image-layer-decay visual-layer-decay wd-exclude torchcompile-strategy
torchcompile-backend torchcompile-mode fsdp fsdp-no-reshard-after-forward fsdp-offload-cpu
fsdp-checkpoint val-retrieval-chunk-size val-retrieval-precision log-metric-every-n-steps
train-loss-ema-samples use-naflex force-naflex-vision naflex-num-train-image-tokens naflex-patch-sizes
naflex-patch-size-probs naflex-seq-lens naflex-seq-len-probs naflex-max-tokens-per-batch
naflex-max-text-tokens naflex-batch-divisor naflex-loss-scale naflex-pad-multiple audio-ext
pretrained-audio audio-fill audio-trunc audio-fusion audio-int16-normalize audio-layer-decay
audio-multiprocessing-context audio-zeroshot-dataset audio-zeroshot-split audio-zeroshot-audio-key
audio-zeroshot-target-key audio-zeroshot-class-key audio-zeroshot-template audio-zeroshot-workers
audio-zeroshot-multiprocessing-context
""".split()  # noqa: SIM905
"""Flags of open_clip's main branch (4.2.0.dev0, June 2026) that 3.3.0 does not have."""

FSDP_PROPOSAL = """
fsdp-layers-to-wrap fsdp-layers-to-grad-checkpoint fsdp-cpu-offload fsdp-init-on-cpu
fsdp-use-distributed-checkpointer fsdp-limit-allgathers fsdp-gradient-reduction-precision
distributed-engine
""".split()  # noqa: SIM905

SOURCE = ["--train-data", "shards/{000..099}.tar", "--train-num-samples", "100000"]


COMMANDS = [
    """--save-frequency 1 --zeroshot-frequency 1 --report-to tensorboard --train-data=/data/train.csv
    --val-data=/data/val.csv --csv-img-key filepath --csv-caption-key title --imagenet-val=/data/imagenet
    --warmup 10000 --batch-size=128 --lr=1e-3 --wd=0.1 --epochs=30 --workers=8 --model RN50""",
    """--train-data '/data/cc12m/cc12m-train-{0000..2175}.tar' --train-num-samples 10968539 --dataset-type
    webdataset --batch-size 320 --precision amp --workers 4 --imagenet-val /data/imagenet""",
    """--save-frequency 1 --train-data=/data/41455.tar::/data/b.tar --train-num-samples 400000000
    --warmup 2000 --batch-size=256 --epochs=32 --workers=8 --model ViT-B-32 --name ViT-B-32-Vanilla
    --seed 0 --local-loss --gather-with-grad --logs /runs""",
    """--dataset-type csv --train-data /data/train.csv --warmup 1000 --batch-size 128 --lr 1e-5 --wd 0.1
    --epochs 1 --workers 3 --model coca_ViT-L-14 --coca-contrastive-loss-weight 0
    --coca-caption-loss-weight 1 --log-every-n-steps 100""",
    """--train-data /data/a.tar --train-num-samples 1000 --model ViT-B-32 --lock-image
    --lock-image-unlocked-groups 3 --lock-image-freeze-bn-stats --lock-text --lock-text-unlocked-layers 10
    --lock-text-freeze-layer-norm --grad-checkpointing --force-patch-dropout 0""",
    """--train-data a.tar::b.tar --train-data-upsampling-factors 1::2 --dataset-resampled --siglip
    --train-num-samples 1000 --aug-cfg scale=(0.9,1.0) gray_scale_prob=0.2 color_jitter=(0.3,0.3,0.3,0.1)
    color_jitter_prob=0.4 --distill-model ViT-L-14 --distill-pretrained openai --resume latest
    --name again --accum-freq 2""",
]
"""Training commands of open_clip's README, and others that use its flags together."""


class _Caught(Exception):
    pass


def open_clip_actions(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Action]:
    """The arguments that the installed open_clip's parser defines."""
    from open_clip_train import params

    def catch(parser: argparse.ArgumentParser, args: object = None) -> None:
        raise _Caught(parser)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", catch)
        with pytest.raises(_Caught) as caught:
            params.parse_args([])
    return [action for action in caught.value.args[0]._actions if action.dest != "help"]


def test_every_flag_of_installed_open_clip_is_accepted_or_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    actions = open_clip_actions(monkeypatch)
    names = {option[2:] for action in actions for option in action.option_strings}
    assert len(names) >= 90
    assert [name for name in sorted(names) if name not in OURS and compatibility.answer(name) is None] == []


def test_switches_of_open_clip_work_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = {a.option_strings[0][2:] for a in open_clip_actions(monkeypatch) if a.nargs == 0}
    ours = sorted(switches & set(OURS))
    assert len(ours) >= 15
    assert [name for name in ours if OURS[name].hint is not bool] == []


def test_choices_of_open_clip_are_accepted_or_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    unanswered = []
    for action in open_clip_actions(monkeypatch):
        name = action.option_strings[0][2:]
        for choice in action.choices or ():
            if name not in OURS:
                continue
            parsed = parsing.parse(
                config.TrainConfig, [f"--{name}", str(choice)], rewrite=compatibility.rewrite
            )
            known = compatibility.VALUES.get(name, {})
            if bool(parsed.problems) != (choice in known):
                unanswered.append((name, choice, parsed.problems))
    assert unanswered == []


def test_every_flag_of_open_clip_main_is_accepted_or_answered() -> None:
    assert [name for name in MAIN_ONLY if name not in OURS and compatibility.answer(name) is None] == []


def test_every_flag_of_the_fsdp_proposal_is_accepted() -> None:
    answers = {name: compatibility.answer(name) for name in FSDP_PROPOSAL if name not in OURS}
    assert [name for name, reply in answers.items() if reply is None or reply.kind == "refused"] == []


def test_a_foreign_name_is_no_flag_of_ours_and_leads_to_one() -> None:
    assert set(compatibility.ANSWERS) & set(OURS) == set()
    aliases = [reply.text for reply in compatibility.ANSWERS.values() if reply.kind == "alias"]
    assert aliases
    assert set(aliases) <= set(OURS)


def test_b62_no_flag_is_ambiguous_to_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.run import get_args_parser

    switches = [f"no-{name}" for name, flag in OURS.items() if flag.hint is bool]
    refused = []
    for name in [*OURS, *switches, *compatibility.ANSWERS, "config"]:
        for flag in (f"--{name}", f"--{name}".replace("-", "_").replace("__", "--", 1)):
            try:
                get_args_parser().parse_args(["--nproc-per-node", "1", "-m", "shardclip", "train", flag, "x"])
            except SystemExit:
                refused.append(flag)
    capsys.readouterr()
    # The one name that open_clip and torchrun both claim; --output-dir is ours, and `--nproc` takes either.
    assert set(refused) <= {"--logs"}


def test_b62_the_own_launcher_leaves_every_flag_alone() -> None:
    words = [f"--{name}" for name in [*OURS, *compatibility.ANSWERS]]
    launch, rest = split_launch_flags(["--nproc", "2", *words])
    assert launch.nproc == 2
    assert rest == words


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_open_clip_are_accepted_unchanged(command: str) -> None:
    assert config.parse(shlex.split(command)).data.train_data is not None


def test_values_reach_their_fields_under_either_name() -> None:
    flags = "--logs /runs --fsdp --fsdp_offload_cpu --local-loss --lr=1e-5 --force-image-size 96 96"
    parsed, notes = config.parse_with_notes([*SOURCE, *flags.split()])
    assert parsed.run.output_dir == "/runs"
    assert parsed.parallel.fsdp
    assert parsed.parallel.fsdp_cpu_offload
    assert parsed.optimizer.lr == 1e-5
    assert parsed.model.force_image_size == 96
    assert len(notes) == 1
    assert notes[0].startswith("--local-loss: always on")


def test_a_refused_flag_says_what_replaces_it() -> None:
    with pytest.raises(UserError) as caught:
        config.parse([*SOURCE, "--horovod", "--use-naflex", "--no-local-loss", "--precision", "pure_bf16"])
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 4
    assert "--horovod: replaced by torchrun" in lines[0]
    assert "always on" in lines[2]
    assert "weights stay fp32" in lines[3]


def test_a_wrong_flag_names_its_nearest_neighbour() -> None:
    with pytest.raises(UserError, match="--lock-imag: no such setting; the nearest is --lock-image"):
        config.parse([*SOURCE, "--lock-imag"])
    with pytest.raises(UserError, match=r"the nearest is .*--local-loss"):
        config.parse([*SOURCE, "--local-los"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train --nprocs 2", "--nprocs: no such setting; the nearest is --nproc"),
        ("train --nproc_per_node 2", "--nproc-per-node: torchrun's word; here it is --nproc,"),
        ("train --confg run.yaml", "--confg: no such setting; the nearest is --config"),
        ("train --force-image-size 224 336", "--force-image-size: only square pictures are taken"),
        ("plan --gpuss 4", "--gpuss: no such setting; the nearest is --gpus"),
        ("plan --nprocs 4", "--nprocs: no such setting; the nearest is --nproc"),
        ("submit --node 4", "--node: no such setting; the nearest is --nodes"),
        ("submit --nproc 8 --rdzv-endpoint a:1", "--nproc, --rdzv-endpoint: srun starts the processes"),
        ("submit --nproc 8", "by --nodes and --gpus-per-node"),
    ],
)
def test_a_wrong_flag_beside_those_of_a_run_does_too(
    words: str, told: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shardclip")  # and put back after the test: `plan` silences the process
    verb, *flags = words.split()
    assert cli.main([verb, *SOURCE, *flags]) == 2
    assert told in capsys.readouterr().err


def test_help_has_a_group_for_each_concern_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    config.show_help()
    text = capsys.readouterr().out
    groups = [f"{concern.replace('_', '-')} options" for concern in get_type_hints(config.TrainCommand)]
    assert [group for group in groups if group not in text] == []
    assert [name for name in WITH_LAUNCH if f"--{name}" not in text] == []


def test_every_setting_is_explained_below_its_field() -> None:
    unexplained = []
    for owner in get_type_hints(config.TrainCommand).values():
        (definition,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(definition, ast.ClassDef)
        explained = set()
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                explained.add(ast.unparse(statement.target))
        unexplained += [field.name for field in dataclasses.fields(owner) if field.name not in explained]
    assert unexplained == []


def test_one_name_for_one_setting() -> None:
    @dataclasses.dataclass(frozen=True)
    class One:
        size: int = 1

    @dataclasses.dataclass(frozen=True)
    class Two:
        size: int = 2

    both = dataclasses.make_dataclass("both", [("one", One), ("two", Two)])
    with pytest.raises(ValueError, match="--size is a field of one and of two"):
        parsing.flags(both)
    assert len(WITH_LAUNCH) > len(OURS) > 100


def test_the_short_help_loads_no_torch() -> None:
    code = (
        "import sys; from shardclip.cli import main; code = main(['--help']); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[-1] == "False"
    assert any(line.split()[:1] == ["train"] for line in lines)


def test_the_page_for_open_clips_users_has_every_answer() -> None:
    page = (Path(__file__).parents[1] / "docs" / "from-open-clip.md").read_text(encoding="utf-8")
    words = {"alias": "another name for `--{}`", "always": "accepted: {}", "refused": "refused: {}"}
    rows = [f"| `--{n}` | {words[a.kind].format(a.text)} |" for n, a in compatibility.ANSWERS.items()]
    assert [row for row in rows if row not in page] == []
    start, end = "<!-- answers -->", "<!-- end of answers -->"
    assert page[page.index(start) : page.index(end)].count("\n| `--") == len(rows)
