"""The one object that a loop tells its numbers to.

with Tracker(config, run_folder, processes) as tracker:
    tracker.begin(total_samples, epoch_samples)
    tracker.step({"loss": 2.3, "samples_per_second": 5000.0, ...}, samples_seen=4096, step=1)
    tracker.evaluation({"imagenet-zeroshot-val-top1": 0.41}, samples_seen=4096, step=1)
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from shardclip.errors import UserError
from shardclip.training.tracking.console import DATE, LINE, Bar, ConsoleHandler, stdout_console
from shardclip.training.tracking.lines import Clock, evaluation_line, loss_names, training_line
from shardclip.training.tracking.sinks import Sink, open_sinks, reporter_names

if TYPE_CHECKING:
    from shardclip.training.distributed import Processes

_log = logging.getLogger("shardclip")


@dataclass(frozen=True)
class TrackingConfig:
    """Logs: what is written, where to, how often."""

    report_to: str = ""
    """Beside console and JSON lines: tensorboard, wandb, trackio (commas between them), or all."""
    wandb_project_name: str = "open-clip"
    """Project in W&B and trackio."""
    wandb_notes: str = ""
    """Notes of the run in W&B."""
    log_every_n_steps: int = 100
    """Steps between lines on the console."""
    log_metric_every_n_steps: int = 10
    """Steps between lines of metrics.jsonl and points in what --report-to names."""
    train_loss_ema_samples: int = 50_000
    """Horizon, in samples, of the moving average of the loss, which stands in parentheses."""
    debug: bool = False
    """Log also what only helps to find a fault."""

    def __post_init__(self) -> None:
        for name in ("log_every_n_steps", "log_metric_every_n_steps", "train_loss_ema_samples"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 1 or more")
        reporter_names(self.report_to)


class Tracker:
    """Console, log files and trackers of one run.

    Rank 0 writes the console, RUN/out.log, RUN/metrics.jsonl, RUN/results.jsonl and what `--report-to` names;
    every other rank writes RUN/logs/rank-N.log. A tracker that fails (a server that is away) is warned of
    once and never stops the training.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_folder: Path,
        processes: "Processes",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the files. Every rank calls this; messages may follow at once, numbers after `begin`.

        Args:
            config: what to write.
            run_folder: folder of the run; made if it is not there.
            processes: the ranks.
            settings: the run's configuration, for W&B and trackio.
        """
        self.config = config
        self.folder = run_folder
        self._primary = processes.is_primary
        self._total = self._per_epoch = 1
        self._averages: dict[str, tuple[float, int]] = {}
        self._broken: set[str] = set()
        self._report_files = processes.report_files
        run_folder.mkdir(parents=True, exist_ok=True)
        self._handlers = self._log_handlers(processes.rank)
        self._rank_names = _rank_names(processes.all_gather_object(processes.host))
        self._sinks: dict[str, Sink] = {}
        self._bar: Bar | None = None
        if self._primary:
            self._sinks = open_sinks(
                config.report_to, run_folder, config.wandb_project_name, config.wandb_notes, settings or {}
            )

    def begin(self, total_samples: int, epoch_samples: int) -> None:
        """Say how long the run and an epoch are, in samples; the bar appears."""
        self._total, self._per_epoch = total_samples, epoch_samples
        if self._primary and self._bar is None:
            self._bar = Bar(total_samples, self._console)

    def _log_handlers(self, rank: int) -> list[logging.Handler]:
        if rank == 0:
            path = self.folder / "out.log"
            self._report_files.append(path)
        else:
            path = self.folder / "logs" / f"rank-{rank}.log"
            path.parent.mkdir(exist_ok=True)
        handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
        handlers[0].setFormatter(logging.Formatter(LINE, DATE))
        if rank == 0:
            self._console = stdout_console()
            handlers.append(ConsoleHandler(self._console))
        self._before = (_log.level, _log.propagate)
        _log.setLevel(logging.DEBUG if self.config.debug else logging.INFO)
        _log.propagate = False
        for handler in handlers:
            _log.addHandler(handler)
        return handlers

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close bar, files and trackers; the logger `shardclip` gets back what it had."""
        if self._bar is not None:
            self._bar.close()
        for name, sink in self._sinks.items():
            self._gently(name, sink.close)
        for handler in self._handlers:
            _log.removeHandler(handler)
            handler.close()
        _log.setLevel(self._before[0])
        _log.propagate = self._before[1]

    def wants(self, step: int) -> bool:
        """Whether the numbers of this step (counted from 1) are shown or kept; others need no measuring."""
        cadences = (self.config.log_every_n_steps, self.config.log_metric_every_n_steps)
        return step == 1 or any(step % every == 0 for every in cadences)

    def advance(self, samples_seen: int) -> None:
        """Move the bar, without new numbers; cheap enough for every step."""
        if self._bar is not None:
            self._bar.show({}, self._clock(samples_seen))

    def step(self, metrics: Mapping[str, float], samples_seen: int, step: int) -> None:
        """The numbers of one step: a line of metrics.jsonl, points elsewhere, and in its turn a log line.

        Known names (open_clip's where they mean the same; all optional): `loss` and others that end in
        `loss`; `lr`; `logit_scale` (the factor itself) and `logit_scale_bound`; `logit_bias`; `grad_norm`;
        `samples_per_second` of all ranks and `samples_per_second_per_gpu`; `data_time` and `batch_time` in
        seconds; `data_wait_share` and `mfu` in 0 to 1; `peak_memory_bytes`; `slowest_rank` and
        `step_time_spread` (its step time over the median, less 1). Others go to the files only.

        Args:
            metrics: numbers by name.
            samples_seen: the run's clock, this step included.
            step: optimizer steps done, this one included.
        """
        if not self._primary:
            return
        if metrics.get("logit_scale", 0.0) > 0:
            metrics = {**metrics, "logit_scale_log": math.log(metrics["logit_scale"])}
        averages = {name: self._average(name, metrics[name], samples_seen) for name in loss_names(metrics)}
        clock = self._clock(samples_seen)
        self._send("train", metrics, step, samples_seen)
        if step == 1 or step % self.config.log_every_n_steps == 0 or samples_seen >= self._total:
            _log.info(training_line(metrics, averages, clock, self._slowest(metrics)))
        if self._bar is not None:
            self._bar.show(metrics, clock)

    def evaluation(self, results: Mapping[str, Any], samples_seen: int, step: int) -> None:
        """The results of one evaluation: a log line, a line of results.jsonl, points `val/NAME` elsewhere."""
        if not self._primary:
            return
        clock = self._clock(samples_seen)
        epochs = samples_seen / self._per_epoch
        self._send("val", {**results, "epoch": round(epochs, 6)}, step, samples_seen)
        _log.info(evaluation_line(results, clock))

    def picture(self, name: str, picture: Image, samples_seen: int, step: int) -> None:
        """Keep a picture as RUN/pictures/NAME-SAMPLES.png and show it where pictures can be shown."""
        if not self._primary:
            return
        path = self.folder / "pictures" / f"{name}-{samples_seen}.png"
        path.parent.mkdir(exist_ok=True)
        picture.save(path)
        for sink_name, sink in self._sinks.items():
            self._gently(sink_name, sink.picture, name, picture, step)

    def message(self, text: str) -> None:
        """A line for people: on the console from rank 0, in the log file of every rank."""
        _log.info(text)

    def warning(self, text: str) -> None:
        """A line about something that needs attention."""
        _log.warning(text)

    def _clock(self, samples_seen: int) -> Clock:
        return Clock(samples_seen, self._total, self._per_epoch)

    def _average(self, name: str, value: float, samples_seen: int) -> float:
        """Exponential moving average over samples; a value that is not finite leaves it as it is."""
        average, before = self._averages.get(name, (value, samples_seen))
        if not math.isfinite(average):
            average = value
        if math.isfinite(value):
            kept = math.exp(-(samples_seen - before) / self.config.train_loss_ema_samples)
            average = kept * average + (1 - kept) * value
        self._averages[name] = (average, samples_seen)
        return average

    def _slowest(self, metrics: Mapping[str, float]) -> str | None:
        return self._rank_names[int(metrics["slowest_rank"])] if "slowest_rank" in metrics else None

    def _send(self, kind: str, values: Mapping[str, Any], step: int, samples_seen: int) -> None:
        for name, sink in self._sinks.items():
            self._gently(name, sink.numbers, kind, values, step, samples_seen)

    def _gently(self, name: str, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:
            if name not in self._broken:
                self._broken.add(name)
                _log.warning(f"{name} failed and may lack numbers from here on: {error!r}")


def _rank_names(hosts: list[str]) -> list[str]:
    """What to call each rank: its host is told where there are several."""
    several = len(set(hosts)) > 1
    return [f"rank {rank} on {host}" if several else f"rank {rank}" for rank, host in enumerate(hosts)]
