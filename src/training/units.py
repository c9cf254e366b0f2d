"""Which modules FSDP gathers and frees as a whole, recomputes, and compiles: decided on the plain model."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardclip.errors import UserError

TOWERS = ("visual", "text", "text_decoder")

_BLOCK_CLASSES = re.compile(
    r"(Custom)?ResidualAttentionBlock|Block|Bottleneck|BasicBlock|ConvNeXtBlock|EvaBlock|ResPostBlock"
    r"|InvertedResidual|SwinTransformer(V2)?Block|M?T5Block|\w*(Bert|Roberta|Electra|Bart)\w*Layer"
)
"""Names that libraries give to the block that a tower repeats; other towers are read by their structure."""

_CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class Unit:
    """One module that is gathered and freed as a whole."""

    name: str
    class_name: str
    parameters: int
    bytes: int


def matches(class_name: str, patterns: Sequence[str]) -> bool:
    """Whether a class name equals one of the patterns or fits it whole as a regular expression."""
    return any(re.fullmatch(pattern, class_name) for pattern in patterns)


def find_units(
    model: nn.Module, patterns: Sequence[str] = (), min_parameters: int | None = None
) -> list[Unit]:
    """The units inside the towers of a plain `DualEncoder`, in the order of its modules; towers not included.

    With `patterns`, the outermost modules whose class name matches; with `min_parameters`, the innermost
    modules that hold at least so many; otherwise the blocks that each tower repeats.

    Raises:
        UserError: a pattern matches nothing, or a tower has no unit (and parameters to shard).
    """
    _check_patterns("--fsdp-layers-to-wrap", model, patterns)
    units: list[Unit] = []
    for tower_name, tower in towers(model):
        if patterns:
            found = list(_outermost(tower, lambda module: matches(type(module).__name__, patterns)))
        elif min_parameters is not None:
            found = list(_by_size(tower, min_parameters))
        else:
            found = find_blocks(tower)
        if not found:
            raise UserError(_no_unit(tower_name, tower, patterns, min_parameters))
        units += [_unit(f"{tower_name}.{name}", module) for name, module in found]
    return units


def towers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The towers that a `DualEncoder` has: image, text and, for captioning models, the decoder."""
    for name in TOWERS:
        if hasattr(model, name):
            yield name, getattr(model, name)


def select(model: nn.Module, flag: str, patterns: Sequence[str]) -> list[str]:
    """Names of the outermost modules in the towers whose class matches; `flag` is named in the error.

    Raises:
        UserError: a pattern matches nothing.
    """
    _check_patterns(flag, model, patterns)
    return [
        f"{tower_name}.{name}"
        for tower_name, tower in towers(model)
        for name, _ in _outermost(tower, lambda module: matches(type(module).__name__, patterns))
    ]


def select_names(model: nn.Module, flag: str, names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Those of the modules `names` whose name or class a pattern fits whole; `flag` is named in the error.

    Raises:
        UserError: a pattern fits none.
    """
    classes = {name: type(model.get_submodule(name)).__name__ for name in names}
    chosen: set[str] = set()
    for pattern in patterns:
        _check_regex(flag, pattern)
        found = {name for name, of in classes.items() if matches(name, [pattern]) or matches(of, [pattern])}
        if not found:
            near = difflib.get_close_matches(pattern, [*names, *set(classes.values())], n=3)
            raise UserError(
                f"{flag} {pattern}: no unit of that name or class; "
                f"nearest: {', '.join(near) or 'none'}. The units are {_list(Counter(classes.values()))}"
            )
        chosen |= found
    return chosen


def runs_in_order(model: nn.Module, units: Sequence[Unit]) -> list[list[str]]:
    """Names of units that stand in one list (`nn.Sequential`, `nn.ModuleList`) and so run one after another.

    The order of other modules' children says nothing about when they run.
    """
    lists: dict[str, list[str]] = {}
    for unit in units:
        parent = unit.name.rpartition(".")[0]
        if isinstance(model.get_submodule(parent), _CONTAINERS):
            lists.setdefault(parent, []).append(unit.name)
    return list(lists.values())


def find_blocks(tower: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a tower, with their names: by well-known class names, else by structure.

    By structure a block is a child of an `nn.Sequential` or `nn.ModuleList` whose children are all composite
    modules of one class, when no such list lies inside it.
    """
    known = list(_outermost(tower, lambda module: bool(_BLOCK_CLASSES.fullmatch(type(module).__name__))))
    if known:
        return known
    blocks = [
        (f"{name}.{child_name}".lstrip("."), child)
        for name, module in tower.named_modules()
        if _is_list_of_blocks(module)
        for child_name, child in module.named_children()
    ]
    return [(n, m) for n, m in blocks if not any(_is_list_of_blocks(inner) for inner in m.modules())]


def _is_list_of_blocks(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, _CONTAINERS)
        and len({type(child) for child in children}) == 1
        and not isinstance(children[0], _CONTAINERS)
        and all(_is_composite(child) for child in children)
    )


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _outermost(root: nn.Module, chosen, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:  # type: ignore[no-untyped-def]
    for name, child in root.named_children():
        full = f"{prefix}{name}"
        if chosen(child) and any(True for _ in child.parameters()):
            yield full, child
        else:
            yield from _outermost(child, chosen, f"{full}.")


def _by_size(root: nn.Module, min_parameters: int, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in root.named_children():
        full = f"{prefix}{name}"
        inner = list(_by_size(child, min_parameters, f"{full}."))
        yield from inner
        # A list cannot be a unit: its own forward is never called, so nothing would gather it.
        if not inner and not isinstance(child, nn.ModuleList) and _size(child) >= min_parameters:
            yield full, child


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _unit(name: str, module: nn.Module) -> Unit:
    return Unit(
        name,
        type(module).__name__,
        _size(module),
        sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()),
    )


def _check_patterns(flag: str, model: nn.Module, patterns: Sequence[str]) -> None:
    classes = Counter(type(module).__name__ for _, tower in towers(model) for module in tower.modules())
    for pattern in patterns:
        _check_regex(flag, pattern)
        if not any(re.fullmatch(pattern, name) for name in classes):
            near = difflib.get_close_matches(pattern, classes, n=3)
            hint = f"nearest: {', '.join(near)}; " if near else ""
            raise UserError(f"{flag} {pattern}: no module of that class; {hint}there are: {_list(classes)}")


def _check_regex(flag: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{flag} {pattern}: not a regular expression ({error})") from None


def _no_unit(tower_name: str, tower: nn.Module, patterns: Sequence[str], min_parameters: int | None) -> str:
    classes = Counter(type(m).__name__ for m in tower.modules() if _is_composite(m))
    if patterns:
        reason = f"no module of the tower `{tower_name}` matches --fsdp-layers-to-wrap {' '.join(patterns)}"
    elif min_parameters is not None:
        reason = (
            f"no module of the tower `{tower_name}` has {min_parameters:,} parameters (--fsdp-min-params)"
        )
    else:
        reason = f"no repeated block was found in the tower `{tower_name}`"
    return f"{reason}; name classes with --fsdp-layers-to-wrap, of these: {_list(classes)}"


def _list(classes: Counter[str]) -> str:
    return ", ".join(f"{name} (x{count})" for name, count in sorted(classes.items()))


def table(units: Sequence[Unit], model: nn.Module) -> str:
    """The units as text: runs of equal blocks on one line, then what each tower holds itself."""
    rows = []
    for first, last, count in _runs(units):
        name = first.name if count == 1 else f"{first.name} .. {last.name.rsplit('.', 1)[-1]}"
        rows.append((name, first.class_name, count, first.parameters, first.bytes))
    inside = [unit.name for unit in units]
    for tower_name, tower in towers(model):
        own = [
            parameter
            for name, parameter in tower.named_parameters()
            if not any(f"{tower_name}.{name}".startswith(f"{unit}.") for unit in inside)
        ]
        size = sum(p.numel() for p in own)
        rows.append((f"{tower_name} (the rest)", type(tower).__name__, 1, size, sum(p.nbytes for p in own)))
    width = max(len(row[0]) for row in rows)
    lines = [f"{'unit':<{width}}  {'class':<24} {'count':>5} {'parameters':>14} {'MiB each':>9}"]
    lines += [f"{n:<{width}}  {c:<24} {k:>5} {p:>14,} {b / 2**20:>9.2f}" for n, c, k, p, b in rows]
    return "\n".join(lines)


def _runs(units: Sequence[Unit]) -> Iterator[tuple[Unit, Unit, int]]:
    """Consecutive units of one parent, class and size: first, last, how many."""
    run: list[Unit] = []
    for unit in units:
        if run and _kind(unit) != _kind(run[0]):
            yield run[0], run[-1], len(run)
            run = []
        run.append(unit)
    if run:
        yield run[0], run[-1], len(run)


def _kind(unit: Unit) -> tuple[str, str, int]:
    return unit.name.rpartition(".")[0], unit.class_name, unit.parameters
