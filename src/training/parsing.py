"""Flags and YAML into a dataclass of dataclasses, with everything that is wrong in one list.

tyro makes the parser from the dataclass. A YAML file is turned into the flags that it stands for, which
come before those of the command line: there is one parser, one set of names and one wording of errors.
"""

import contextlib
import dataclasses
import difflib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import tyro
import yaml

from shardclip.errors import UserError

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
"""From a setting under a foreign name to ours that mean the same, or to a message that refuses it."""


@dataclass(frozen=True)
class Parsed(Generic[C]):
    """What came of a command line."""

    config: C
    """Made of the settings that could be read."""
    problems: list[str]
    """One entry for each setting that could not."""
    names: list[str]
    """Every setting's name, as it was given."""


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


def show_help(cls: type, prog: str, description: str) -> None:
    """Print all flags, in one group for each concern, with their defaults."""
    with contextlib.suppress(SystemExit):
        tyro.cli(cls, args=["--help"], prog=prog, description=description, config=MARKERS)


def parse(
    cls: type[C],
    argv: Sequence[str],
    files: Iterable[Path] = (),
    rewrite: Rewrite = lambda setting: [setting],
    foreign: Iterable[str] = (),
) -> Parsed[C]:
    """Defaults, then the YAML files, then the flags of `argv`; later ones win.

    Args:
        cls: a dataclass of dataclasses, every field with a default.
        argv: flags and their values.
        files: YAML files, in one mapping or one for each concern.
        rewrite: answers settings under foreign names; called for every setting.
        foreign: names that are known elsewhere (to `rewrite`, to a launcher), to suggest the nearest one.
    """
    known = flags(cls)
    settings, problems = _read_argv(argv)
    for file in reversed(list(files)):
        from_file, wrong = _read_yaml(file, known)
        settings, problems = from_file + settings, wrong + problems
    chosen: dict[str, Setting] = {}
    for setting in settings:
        answer = rewrite(setting)
        if isinstance(answer, str):
            problems.append(f"{setting.source}: {answer}")
            continue
        for item in answer:
            if name := _own_name(item, known):
                chosen[name] = item
            else:
                problems.append(f"{item.source}: no such setting{_nearest(item.name, [*known, *foreign])}")
    concerns: dict[str, Any] = {}
    for concern, owner in get_type_hints(cls).items():
        mine = [setting for name, setting in chosen.items() if known[name].concern == concern]
        concerns[concern], wrong = _concern(owner, mine)
        problems += wrong
    return Parsed(cls(**concerns), problems, [setting.name for setting in settings])


def names_of(*classes: type) -> list[str]:
    """The names of flags that stand for the fields of flat dataclasses, without the dashes before them."""
    return [
        field.name.replace("_", "-")
        for cls in classes
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]


def _own_name(setting: Setting, known: dict[str, Flag]) -> str | None:
    """The flag that a setting is for, also in its negated form; None if there is no such flag."""
    if setting.name in known:
        return setting.name
    positive = setting.name.removeprefix("no-")
    return positive if positive in known and known[positive].hint is bool else None


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(dict.fromkeys(names)), n=2, cutoff=0.6)
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


def _read_yaml(file: Path, known: dict[str, Flag]) -> tuple[list[Setting], list[str]]:
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
    concerns = {flag.concern for flag in known.values()}
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
        words = [f"{key}={item}" for key, item in value.items()]
    elif isinstance(value, list):
        words = [str(word) for word in value]
    else:
        return Setting(name, (str(value),), source, joined=True)
    if bad := [word for word in words if word.startswith("--")]:
        raise ValueError(f"{bad[0]!r} begins with dashes and would be taken for a flag")
    return Setting(name, tuple(words), source)


def _concern(owner: type[C], settings: list[Setting]) -> tuple[C, list[str]]:
    """One concern from its settings; if some cannot be read each is tried alone, so that all are named."""
    result = _attempt(owner, settings)
    if not isinstance(result, str | UserError):
        return result, []
    alone = [(setting, _attempt(owner, [setting])) for setting in settings]
    problems = [f"{setting.source}: {answer}" for setting, answer in alone if isinstance(answer, str)]
    rest = _attempt(owner, [setting for setting, answer in alone if not isinstance(answer, str)])
    return (owner(), [*problems, str(rest)]) if isinstance(rest, str | UserError) else (rest, problems)


def _attempt(owner: type[C], settings: list[Setting]) -> C | str | UserError:
    """The concern, or what tyro says against a value, or what the concern itself refuses."""
    if not settings:
        return owner()
    complaint = io.StringIO()
    words = [word for setting in settings for word in setting.argv()]
    try:
        # Where standard output is no terminal, tyro draws its box in plain ASCII.
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(owner, args=words, prog="shardclip")
    except SystemExit:
        return _message(complaint.getvalue())
    except UserError as error:
        return error


def _message(box: str) -> str:
    """What tyro says in the box that it draws: the part between title and pointer to the help text."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    parts = re.split(r"\n\s*-{4,}\s*\n", plain)
    text = " ".join(parts[min(1, len(parts) - 1)].split())
    what, _, reason = text.partition(": ")
    return f"does not take {reason}" if what == "Unrecognized options" else reason or text
