"""Class names and prompt templates: ImageNet's, those beside a data set, or those of two files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec

from shardclip.errors import UserError

CLASSNAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
DEFAULT_TEMPLATES = ("a photo of a {c}.",)
_PLACES = ("{c}", "{}")


@dataclass(frozen=True)
class Names:
    """The words that a data set's classes are asked for with."""

    classnames: tuple[str, ...]
    """In the order of the labels."""
    templates: tuple[str, ...]
    """Prompts with `{c}` or `{}` where the name goes."""

    @property
    def digest(self) -> str:
        """12 hexadecimal digits that tell whether two results were asked for with the same words."""
        text = json.dumps([self.classnames, self.templates])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def prompts(classnames: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Every template with every name, the templates of one name together.

    Raises:
        UserError: no class, no template, or a template without a place for the name.
    """
    if not classnames or not templates:
        raise UserError("zero-shot classification needs at least one class name and one template")
    for template in templates:
        if not any(place in template for place in _PLACES):
            raise UserError(f"zero-shot template {template!r}: no {{c}} or {{}} where the class name goes")
    return [_filled(template, name) for name in classnames for template in templates]


def _filled(template: str, name: str) -> str:
    place = next(place for place in _PLACES if place in template)
    return template.replace(place, name)


def imagenet() -> Names:
    """The 1,000 names and 80 templates that open_clip evaluates with."""
    from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

    return Names(tuple(IMAGENET_CLASSNAMES), tuple(template("{c}") for template in OPENAI_IMAGENET_TEMPLATES))


def find(data: str, classnames_file: str | None, templates_file: str | None, folders: Sequence[str]) -> Names:
    """The names and templates of a data set.

    Args:
        data: where its pictures are.
        classnames_file: a file of names, one a line; None looks beside the data.
        templates_file: a file of templates, one a line; None looks beside the data.
        folders: the names of its class folders, if it has any.

    Raises:
        UserError: a file cannot be read, or there are no names.
    """
    classnames_file = classnames_file or _beside(data, CLASSNAMES_FILE)
    templates_file = templates_file or _beside(data, TEMPLATES_FILE)
    if classnames_file is not None:
        classnames = _lines(classnames_file)
    elif folders:
        classnames = tuple(folder.replace("_", " ") for folder in folders)
    else:
        raise UserError(
            f"--zeroshot-data {data}: the class names are not known. Give --zeroshot-classnames FILE, one a "
            f"line in the order of the labels, or put a {CLASSNAMES_FILE} beside the data."
        )
    templates = DEFAULT_TEMPLATES if templates_file is None else _lines(templates_file)
    prompts(classnames, templates)
    return Names(classnames, templates)


def _beside(data: str, name: str) -> str | None:
    """The file in the data's folder or one of the two above it (shards lie in ROOT/test/0.tar)."""
    if "://" in data or data.startswith("pipe:"):
        return None
    folder = Path(data) if os.path.isdir(data) else Path(data).parent
    for place in (folder, folder.parent, folder.parent.parent):
        if (place / name).is_file():
            return str(place / name)
    return None


def _lines(path: str) -> tuple[str, ...]:
    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    while lines and not lines[-1]:
        lines.pop()
    if "" in lines or not lines:
        where = f"line {lines.index('') + 1} is empty" if lines else "it is empty"
        raise UserError(f"{path}: {where}; a name or template is meant on each line")
    return tuple(lines)
