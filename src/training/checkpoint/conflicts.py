"""What a resumed run does otherwise than the run that it goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Mapping[str, Any]]
"""Plain values by concern and name, as in a run's `config.yaml`."""

_DECIDING: dict[str, frozenset[str]] = {
    "model": frozenset({"cache_dir", "pretrained", "pretrained_image", "pretrained_text"})
    | {"pretrained_image_path", "pretrained_text_path"},
    "data": frozenset({"workers", "streams", "val_data", "val_num_samples"})
    | {"data_timeout", "data_retries", "max_skip_rate"},
    "objective": frozenset({"loss_tile"}),
    "optimizer": frozenset(),
    "lock": frozenset(),
    "ema": frozenset(),
}
"""Concerns whose settings decide what is learnt, each with those of its settings that do not."""
_OF_RUN = ("epochs", "seed")


def conflicts(then: Settings, then_ranks: int, now: Settings, now_ranks: int) -> list[str]:
    """One line for each setting that decides what is learnt and has changed: flag, old value, new value.

    Engine, precision, number of ranks, workers, evaluation and tracking may change freely, and the local
    batch may as long as the global one stays. A setting that one side does not know is of another version.
    """
    differences = {
        name: (then["run"].get(name), now["run"].get(name)) for name in _OF_RUN if name in then["run"]
    }
    for concern, free in _DECIDING.items():
        before, after = then.get(concern, {}), now.get(concern, {})
        differences |= {
            name: (before[name], after[name]) for name in before if name in after and name not in free
        }
    lines = [
        f"{_flag(name)}: {old} then, {new} now" for name, (old, new) in differences.items() if old != new
    ]
    batch_then, batch_now = _global_batch(then, then_ranks), _global_batch(now, now_ranks)
    if batch_then != batch_now:
        keeping = _keeping(batch_then, now, now_ranks)
        lines.append(f"global batch: {batch_then} then, {batch_now} now{keeping}")
    return lines


def _global_batch(settings: Settings, ranks: int) -> int:
    return ranks * settings["run"]["batch_size"] * settings["run"]["accum_freq"]


def _keeping(global_batch: int, settings: Settings, ranks: int) -> str:
    """What gives so many ranks that global batch, one flag changed; empty where nothing divides it."""
    run = settings["run"]
    rest = {"--batch-size": ranks * run["accum_freq"], "--accum-freq": ranks * run["batch_size"]}
    fitting = [f"{flag} {global_batch // other}" for flag, other in rest.items() if global_batch % other == 0]
    on = f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
    return f" ({' or '.join(fitting)} on {on} keeps it)" if fitting else ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
