"""How often torch.compile compiles again: training stands still, and after a few times it gives up."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch._dynamo
from torch._dynamo.callback import CallbackArgs, CallbackTrigger

log = logging.getLogger(__name__)


class Compilations:
    """Counts the graphs that torch.compile makes in this process from now on, of whatever function."""

    def __init__(self) -> None:
        self._made = 0
        self._first_step: int | None = None
        torch._dynamo.on_compile_start(self._compiled)

    def _compiled(self, made: CallbackArgs) -> None:
        self._made += made.callback_trigger is CallbackTrigger.DYNAMO

    def again(self) -> int:
        """Graphs made since the first call, which wants to come after the first step: all is new there."""
        if self._first_step is None:
            self._first_step = self._made
            log.info("torch.compile: %d graphs in the first step", self._made)
        return self._made - self._first_step

    def close(self) -> None:
        """Stop counting."""
        torch._dynamo.callback_handler.remove_start_callback(self._compiled)


def warning(before: int, by_rank: Sequence[int]) -> str | None:
    """What to say when a rank has compiled again; None if none has.

    Args:
        before: the most graphs of any rank (`Compilations.again`) when this was asked last.
        by_rank: the graphs of each rank now.
    """
    most = max(by_rank)
    if most <= before:
        return None
    return (
        f"torch.compile: {most} graphs were compiled after the first step on rank {by_rank.index(most)}, "
        f"{most - before} of them since the last line. All ranks wait meanwhile, and after "
        f"{torch._dynamo.config.recompile_limit} graphs a function runs as it is; TORCH_LOGS=recompiles tells"
    )
