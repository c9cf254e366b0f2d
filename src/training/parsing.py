"""Flags and YAML into a dataclass of dataclasses, with everything that is wrong in one list.

tyro makes the parser from the dataclass. A YAML file is turned into the flags that it stands for, which
come before those of the command line: there is one parser, one set of names and one wording of errors.
"""

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import tyro
import yaml

C = TypeVar("C")

MARKERS = (tyro.conf.OmitArgPrefixes,)


@dataclass(frozen=True)
class Flag:
    """One field of one concern, as a flag."""

    name: str
    """The flag without its two dashes, words joined by hyphens."""
    concern: str
    """The field of the composed dataclass that holds it."""
    hint: Any
    """Its type."""


@dataclass(frozen=True)
class Setting:
    """One flag with its values, as given on the command line or in a file."""

    name: str
    """The flag without its two dashes."""
    values: tuple[str, ...]
    """The words after it."""
    source: str
    """What messages call it: `--lr`, or `run.yaml:7: lr`."""
    joined: bool = False
    """Whether the one value came after `=`, and may therefore begin with dashes."""

    def argv(self) -> list[str]:
        """The words that a parser is given for it."""
        if self.joined:
            return [f"--{self.name}={self.values[0]}"]
        return [f"--{self.name}", *self.values]


Rewrite = Callable[[Setting], "list[Setting] | str"]
"""From a setting under a foreign name to those under ours that mean the same, or to the message that refuses it."""


@dataclass(frozen=True)
class Parsed(Generic[C]):
    """What came of a command line."""

    config: C
    """Made of the settings that could be read."""
    problems: list[str]
    """One entry for each setting that could not."""


def flags(cls: type) -> dict[str, Flag]:
    """The flags of a dataclass whose every field is a dataclass (a concern), by name.

    Raises:
        ValueError: two concerns have a field of one name.
    """
    found: dict[str, Flag] = {}
    for concern, owner in get_type_hints(cls).items():
        hints = get_type_hints(owner)
        for field in dataclasses.fields(owner):
            name = field.name.replace("_", "-")
            if name in found:
                raise ValueError(f"--{name} is a field of {found[name].concern} and of {concern}")
            found[name] = Flag(name, concern, hints[field.name])
    return found


def parse(
    cls: type[C],
    argv: Sequence[str],
    prog: str,
    description: str = "",
    files: Iterable[Path] = (),
    rewrite: Rewrite = lambda setting: [setting],
    foreign: Iterable[str] = (),
) -> Parsed[C]:
    """Defaults, then the YAML files, then the flags of `argv`; later ones win.

    Args:
        cls: a dataclass of dataclasses, every field with a default.
        argv: flags; `--help` prints the help text and leaves with code 0.
        prog: what the help text calls the program.
        description: first lines of the help text.
        files: YAML files, in one mapping or one for each concern.
        rewrite: answers settings under foreign names; called for each setting that is not a flag of `cls`.
        foreign: the names that `rewrite` knows, to suggest the nearest one.
    """
    if "-h" in argv or "--help" in argv:
        tyro.cli(cls, args=["--help"], prog=prog, description=description, config=MARKERS)
    known = flags(cls)
    settings, problems = _read_argv(argv)
    for file in reversed(list(files)):
        from_file, wrong = _read_yaml(file, known, {flag.concern for flag in known.values()})
        settings, problems = from_file + settings, wrong + problems
    chosen: dict[str, Setting] = {}
    for setting in settings:
        own = setting.name.removeprefix("no-") if _is_negation(setting.name, known) else setting.name
        answer = [setting] if own in known else rewrite(setting)
        if isinstance(answer, str):
            problems.append(f"{setting.source}: {answer}")
            continue
        for item in answer:
            key = item.name.removeprefix("no-") if _is_negation(item.name, known) else item.name
            if key in known:
                chosen[key] = item
            else:
                problems.append(f"{item.source}: no such setting{_nearest(key, [*known, *foreign])}")
    return _through_tyro(cls, prog, list(chosen.values()), known, problems)


def _is_negation(name: str, known: dict[str, Flag]) -> bool:
    return name not in known and known.get(name.removeprefix("no-"), Flag("", "", None)).hint is bool


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=2, cutoff=0.6)
    return "; the nearest is " + " or ".join(f"--{item}" for item in close) if close else ""


def _read_argv(argv: Sequence[str]) -> tuple[list[Setting], list[str]]:
    """The settings of a command line: each word that begins with two dashes, and the words after it."""
    settings: list[Setting] = []
    problems: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, joined, value = word[2:].partition("=")
            name = name.replace("_", "-")
            settings.append(Setting(name, (value,) if joined else (), f"--{name}", bool(joined)))
        elif not settings:
            problems.append(f"{word!r} stands before any flag")
        elif settings[-1].joined:
            problems.append(f"{settings[-1].source}: {word!r} follows a value that was given with '='")
        else:
            settings[-1] = dataclasses.replace(settings[-1], values=(*settings[-1].values, word))
    return settings, problems


def _read_yaml(file: Path, known: dict[str, Flag], concerns: set[str]) -> tuple[list[Setting], list[str]]:
    """The settings of a YAML file: `name: value` at the top, or below the name of a concern."""
    try:
        loader = yaml.SafeLoader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
    except OSError as error:
        return [], [f"{file}: cannot be read: {error.strerror}"]
    except yaml.YAMLError as error:
        return [], [f"{file}: is not YAML: {' '.join(str(error).split())}"]
    if node is None:
        return [], []
    if not isinstance(node, yaml.MappingNode):
        return [], [f"{file}: must be a mapping of names to values"]
    settings: list[Setting] = []
    problems: list[str] = []
    pairs = list(node.value)
    while pairs:
        key_node, value_node = pairs.pop(0)
        name = str(loader.construct_object(key_node))
        if name in concerns and isinstance(value_node, yaml.MappingNode):
            pairs = value_node.value + pairs
            continue
        source = f"{file}:{key_node.start_mark.line + 1}: {name}"
        value = loader.construct_object(value_node, deep=True)
        name = name.replace("_", "-")
        hint = known[name].hint if name in known else None
        try:
            settings.append(_from_value(name, value, hint, source))
        except ValueError as error:
            problems.append(f"{source}: {error}")
    return settings, problems


def _from_value(name: str, value: Any, hint: Any, source: str) -> Setting:
    """The flag that a YAML value stands for."""
    if isinstance(value, bool) and hint in (bool, None):
        return Setting(name if value else f"no-{name}", (), source)
    if hint is bool:
        raise ValueError(f"must be true or false, not {value!r}")
    if isinstance(value, dict):
        words = [str(word) for pair in value.items() for word in pair]
    elif isinstance(value, list):
        words = [str(word) for word in value]
    else:
        return Setting(name, (str(value),), source, joined=True)
    if bad := [word for word in words if word.startswith("--")]:
        raise ValueError(f"{bad[0]!r} begins with dashes and would be taken for a flag")
    return Setting(name, tuple(words), source)


def _through_tyro(
    cls: type[C], prog: str, settings: list[Setting], known: dict[str, Flag], problems: list[str]
) -> Parsed[C]:
    """All settings at once; if that fails each alone, so that every wrong one is named."""

    def attempt(tried: list[Setting]) -> C | str:
        complaint = io.StringIO()
        words = [word for setting in tried for word in setting.argv()]
        with contextlib.redirect_stderr(complaint):
            try:
                return tyro.cli(cls, args=words, prog=prog, config=MARKERS)
            except SystemExit:
                return _first_paragraph(complaint.getvalue())

    result = attempt(settings)
    if not isinstance(result, str):
        return Parsed(result, problems)
    good, reasons = [], []
    for setting in settings:
        alone = attempt([setting])
        if isinstance(alone, str):
            reasons.append(f"{setting.source}: {alone}")
        else:
            good.append(setting)
    rest = attempt(good)
    if isinstance(rest, str):
        return Parsed(cls(), [*problems, *reasons, rest])
    return Parsed(rest, problems + reasons)


def _first_paragraph(box: str) -> str:
    """What tyro says in the box that it draws, up to the first rule."""
    lines = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    rule = next((i for i, line in enumerate(lines) if set(line) == {"─"}), len(lines))
    text = " ".join(lines[:rule])
    what, _, reason = text.partition(": ")
    return f"does not take {reason}" if what == "Unrecognized options" else reason or text
