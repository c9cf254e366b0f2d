"""The terminal: a bar with rates and the time left where there is one, plain lines where there is not."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from shardclip.training.tracking.lines import Clock

LINE = "%(asctime)s | %(levelname)s | %(message)s"
"""Of console and log files, as open_clip's."""
DATE = "%Y-%m-%d,%H:%M:%S"


class Bar:
    """A progress bar over the samples of the run; does nothing where the output is not a terminal."""

    def __init__(self, total: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[rate]}"),
            TextColumn("left {task.fields[left]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._rate = 0.0
        self._task: TaskID = self._progress.add_task(
            "epoch 0", total=total, rate="", left="unknown", numbers=""
        )
        self._progress.start()

    def show(self, metrics: Mapping[str, float], clock: Clock) -> None:
        """Move the bar and show the newest numbers beside it."""
        self._rate = metrics.get("samples_per_second", self._rate)
        short = {"loss": "loss {:.4g}", "logit_scale": "scale {:.4g}", "grad_norm": "norm {:.3g}"}
        fields: dict[str, Any] = {"left": clock.remaining(self._rate)}
        if self._rate > 0:
            fields["rate"] = f"{self._rate:,.0f}/s"
        numbers = " ".join(text.format(metrics[name]) for name, text in short.items() if name in metrics)
        if numbers:
            fields["numbers"] = numbers
        self._progress.update(self._task, completed=clock.seen, description=f"epoch {clock.epoch}", **fields)

    def close(self) -> None:
        """Leave the terminal as it was found, the finished bar above the prompt."""
        self._progress.stop()


class ConsoleHandler(logging.Handler):
    """Log lines above the bar, or by themselves; long ones are never broken."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter(LINE, DATE))

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            line = self.format(record)
            if self._console.is_terminal:
                style = "yellow" if record.levelno >= logging.WARNING else ""
                self._console.print(Text(line, style), soft_wrap=True)
            else:
                print(line, file=self._console.file, flush=True)
        except Exception:
            self.handleError(record)


def stdout_console() -> Console:
    """The console of this process: where standard output goes at this moment."""
    return Console(file=sys.stdout)
