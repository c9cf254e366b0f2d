"""The commands of README and docs: each is parsed, and all that need no cluster are run, at small sizes.

A block of commands is marked `sh`; with a comment `<!-- parsed: WHY -->` before it, it is parsed only. One of
`python` is run. Small data lies where the commands look for it, and small sizes are added to them.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from data.shards import picture, write_tar
from evaluation import small
from launched import Launched, torchrun_environments
from PIL import Image

from shardclip import cli
from shardclip.launch import split_launch_flags
from shardclip.models import factory
from shardclip.models.export import UnreadTensor, write_model
from shardclip.models.factory import ModelConfig
from shardclip.training import compatibility, config, parsing
from shardclip.training.evaluation.command import EvalCommand, EvalConfig
from shardclip.training.planning import PlanConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?P<mark><!-- parsed: [^\n]* -->\n)?```(?P<language>sh|python)\n(?P<text>.*?)```", re.DOTALL
)
SMALL = """--model-config model.json --batch-size 4 --train-num-samples 8 --epochs 1 --warmup 0 --workers 0
--device cpu --precision fp32""".split()  # noqa: SIM905
"""Goes over the sizes of a training command."""
SOURCE = ["--train-data", "shards/{00000..01023}.tar"]
OF_OTHERS = {
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "nodes",
    "ntasks-per-node",
    "gpus-per-node",
    "time",
    "array",
    "signal",
    "target",
}
"""Flags of torchrun, SLURM and pip."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    words: tuple[str, ...]
    is_run: bool
    is_shortened: bool
    """Whether the page leaves a part out, as `...`."""


def blocks(page: Path) -> Iterator[re.Match[str]]:
    return BLOCK.finditer(page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[Command]:
    for block in blocks(page):
        if block["language"] == "sh":
            for line in block["text"].replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    kept = tuple(word for word in words if word != "...")
                    yield Command(kept, not block["mark"], len(kept) < len(words))


EVERY = [(page, command) for page in PAGES for command in commands(page)]
NAMES = [f"{page.stem}-{number}" for number, (page, _) in enumerate(EVERY)]


def verb_and_flags(words: tuple[str, ...]) -> list[str]:
    """What `shardclip` gets, whoever starts it: a shell, srun, torchrun or a batch file."""
    if words[0] == "sbatch":
        place = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
        assert (ROOT / words[place]).is_file()
        passed = words[place + 1 :]
        return ["train", *(passed[1:] if words[place].endswith("array.sbatch") else passed)]
    return list(words[words.index("shardclip") + 1 :])


def parse(verb: str, flags: list[str]) -> None:
    """Refuse what the verb would refuse."""
    if verb == "train":
        config.parse(split_launch_flags(flags)[1])
    elif verb == "eval":
        words = split_launch_flags(flags[1:])[1]
        assert parsing.parse(EvalConfig, words, rewrite=compatibility.rewrite).problems == []
    else:
        assert verb in cli.VERBS


@pytest.mark.parametrize(("page", "command"), EVERY, ids=NAMES)
def test_a_command_of_the_pages_is_understood(
    page: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings in ("clip-b32.yaml", "runs/my-run/config.yaml"):
        (tmp_path / settings).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / settings).write_text("train_data: shards/{00000..01023}.tar\n")
    monkeypatch.chdir(tmp_path)
    first = command.words[0]
    if first == "make":
        assert re.search(rf"^{command.words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif first == "python":
        script = (ROOT / command.words[1]).read_text() + (
            ROOT / "scripts" / "bench" / "report.py"
        ).read_text()
        assert [word for word in command.words if word.startswith("--") and f'"{word}"' not in script] == []
    elif first == "pip":
        assert command.words[:2] == ("pip", "install")
    else:
        verb, *flags = verb_and_flags(command.words)
        parse(verb, [*flags, *SOURCE] if command.is_shortened else flags)


def test_every_flag_that_a_page_names_is_one() -> None:
    known = {
        *parsing.flags(config.TrainCommand),
        *parsing.flags(EvalCommand),
        *compatibility.ANSWERS,
        *OF_OTHERS,
    }
    known |= {name.replace("_", "-") for name in PlanConfig.__dataclass_fields__}
    known |= {"config", "help", "out", "format", "dtype", "metrics"}
    for script in ROOT.glob("scripts/**/*.py"):
        known |= set(re.findall(r'"--([a-z-]+)"', script.read_text(encoding="utf-8")))
    for page in PAGES:
        named = re.findall(
            r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?![a-z0-9-])", page.read_text(encoding="utf-8")
        )
        unknown = {name for name in named if name not in known and name.removeprefix("no-") not in known}
        assert unknown == set(), page


def test_links_and_files_that_a_page_names_are_there() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#]+)\)", text)
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
        files = re.findall(r"`((?:tests|scripts|src)/[\w./-]+)`", text)
        assert [file for file in files if not (ROOT / file).exists()] == [], page
        assert page.name == "README.md" or f"({page.name})" in index


def jpeg(number: int) -> bytes:
    return picture(number, (48, 48), "JPEG")


def write_shards(folder: Path, name: str, count: int) -> None:
    members: list[tuple[str, bytes]] = []
    for number in range(count):
        texts = {"long": f"a long caption of picture {number}", "short": f"picture {number}"}
        key = f"{int(name):05d}{number:04d}"
        members += [(f"{key}.jpg", jpeg(number)), (f"{key}.txt", texts["short"].encode())]
        members += [(f"{key}.json", json.dumps(texts).encode())]
    write_tar(folder / f"{name}.tar", members)


def in_folder(folder: str, words: list[str]) -> int:
    """A command as in that folder."""
    os.chdir(folder)
    if words[0] == "python":
        sys.argv = words[1:]
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        return 0
    return cli.main(words)


def python_in_folder(folder: str, text: str) -> int:
    """A block of Python as a script in that folder."""
    os.chdir(folder)
    exec(compile(text, "block", "exec"), {"__name__": "__main__"})
    return 0


def run(folder: Path, function: Callable[..., int], what: Any, world_size: int = 1) -> None:
    environments = torchrun_environments(world_size) if world_size > 1 else [{}]
    output = folder / "output"
    output.mkdir(exist_ok=True)
    with Launched(output, environments, function, str(folder), what) as launched:
        assert launched.end() == [0] * world_size, f"{what}\n{launched.all_said}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the pages' commands find there."""
    folder = tmp_path_factory.mktemp("docs")
    model_cfg = tiny.spec().model_cfg
    model_cfg["text_cfg"]["vocab_size"] = 49408
    (folder / "model.json").write_text(json.dumps(model_cfg))
    for name in ("00000", "00001"):
        write_shards(folder / "shards", name, 8)
    write_shards(folder / "more", "000", 8)
    write_shards(folder / "val", "00", 8)
    small.write_labelled(folder / "cifar10")
    (folder / "cat.jpg").write_bytes(jpeg(0))
    rows = [f"{number}.jpg\tpicture {number}" for number in range(8)]
    for number in range(8):
        (folder / f"{number}.jpg").write_bytes(jpeg(number))
    (folder / "pairs.csv").write_text("\n".join(["filepath\ttitle", *rows]) + "\n")
    spec = factory.resolve(ModelConfig(model_config=str(folder / "model.json")))
    weights = factory.build(spec, seed=0).state_dict()
    torch.save(weights, folder / "weights.pt")
    unread = {name: UnreadTensor.of(tensor) for name, tensor in weights.items()}
    write_model(unread, spec, folder / "my-model", format="hf")
    run(folder, in_folder, ["train", "--train-data", "shards/00000.tar", "--name", "my-run", *SMALL])
    run(
        folder,
        in_folder,
        ["eval", "runs/my-run", "--data", "val", "--results", "results.jsonl", "--workers", "0"],
    )
    return folder


def at_small_size(words: tuple[str, ...], folder: Path) -> list[str]:
    """The command as the test runs it."""
    if words[0] == "python":
        return list(words)
    verb, *flags = verb_and_flags(words)
    if verb in ("train", "eval"):
        source, flags = ([], flags) if verb == "train" else (flags[:1], flags[1:])
        flags = [*source, *split_launch_flags(flags)[1]]
    if verb == "train":
        if "--name" in flags and "--resume" not in flags:
            shutil.rmtree(folder / "runs" / flags[flags.index("--name") + 1], ignore_errors=True)
        return [verb, *flags, *SMALL]
    if verb == "eval":
        return [verb, *flags, "--workers", "0", "--precision", "fp32", "--device", "cpu"]
    return [verb, *flags, *(SMALL if verb == "plan" else ())]


def is_run(command: Command) -> bool:
    return command.is_run and command.words[0] not in ("make", "pip") and not command.is_shortened


RUN = [page for page in PAGES if any(is_run(c) for c in commands(page)) or "```python" in page.read_text()]


@pytest.mark.long
@pytest.mark.parametrize("page", RUN, ids=[page.stem for page in RUN])
def test_the_commands_of_a_page_run(page: Path, place: Path) -> None:
    for command in filter(is_run, commands(page)):
        words = at_small_size(command.words, place)
        run(place, in_folder, words, world_size=2 if page.stem == "fsdp" and words[0] == "train" else 1)
    for block in blocks(page):
        if block["language"] == "python" and not block["mark"]:
            run(place, python_in_folder, block["text"])
    for drawn in place.glob("*.png"):
        with Image.open(drawn) as opened:
            assert len(opened.convert("RGB").getcolors(2**24)) > 10
