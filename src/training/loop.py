"""The training loop: steps until the samples are seen, with evaluation and saving on the way."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

from shardclip.errors import UserError
from shardclip.training import compilation
from shardclip.training.config import TrainConfig, as_dict
from shardclip.training.data.batch import Batch
from shardclip.training.data.loader import account, merge_states
from shardclip.training.distributed import Processes
from shardclip.training.evaluation.config import Task
from shardclip.training.evaluation.results import Result, scalars
from shardclip.training.evaluation.run import evaluate
from shardclip.training.failure import EXIT_REQUEUE
from shardclip.training.fetching import Stoppable
from shardclip.training.signals import Stopped
from shardclip.training.start import Run, run_folder, start_run
from shardclip.training.statistics import average_statistics
from shardclip.training.step import SCALE_BOUNDS, StepResult
from shardclip.training.throughput import Meter, peak_flops, peak_memory_bytes
from shardclip.training.tracking import Tracker

log = logging.getLogger(__name__)


def train(config: TrainConfig, processes: Processes) -> int:
    """Train as `config` says; every rank calls this. Returns the exit code: 0, or 85 when asked to stop.

    Raises:
        UserError: something that the user can put right.
    """
    folder = run_folder(config, processes)
    with Tracker(config.tracking, folder, processes, settings=as_dict(config)) as tracker:
        run = start_run(config, folder, processes)
        tracker.begin(run.length.samples, run.length.samples_per_epoch)
        try:
            return _Loop(run, tracker).train()
        finally:
            run.loader.close()


class _Queued(NamedTuple):
    """A step that the device may not have finished yet."""

    number: int
    batch: Batch
    result: StepResult


class _Loop:
    """The run's clock and its appointments."""

    def __init__(self, run: Run, tracker: Tracker) -> None:
        self.run, self.tracker = run, tracker
        self.meter = Meter()
        self.queued: _Queued | None = None
        self.skipped_in_a_row = 0
        self.left_out: Counter[str] = Counter()
        self.saved_at = time.monotonic()
        self.peak = peak_flops(run.processes.device, run.engine.compute_dtype)
        self.compilations = compilation.Compilations() if run.config.parallel.torchcompile else None
        self.recompiled = 0

    @property
    def progress(self) -> dict[str, Any]:
        """The run's clock and the position of its data: what a checkpoint keeps beside tensors."""
        return self.run.state.progress

    def train(self) -> int:
        """Steps until the samples are seen or a stop is agreed; the exit code."""
        run, position = self.run, self.run.processes.position
        batches = Stoppable(iter(run.loader), run.processes.stop)
        stopping = self._evaluate(self.progress.setdefault("evaluating", []))
        while self.progress["steps"] < run.length.steps and not stopping:
            position.at("data", self.progress["steps"] + 1)
            with self.meter.timing("data"):
                batch = batches.take()
            position.at("train", self.progress["steps"] + 1, batch.keys if batch else [])
            totals = run.step.agree(batch, save=self._is_saving_time())
            stopping = totals.stop
            if batch is None or not totals.ready:
                self._save()
                break
            with self.meter.timing("step"):
                lr = run.schedule.apply(run.step.update.optimizer, self.progress["samples"])
                result = run.step(batch, totals)
                # The step before: a device had the time of this one's queueing to finish it.
                self._settle()
            self._advance(batch, result)
            self._track(result, lr)
            stopping |= self._evaluate_if_due(totals.samples)
            if totals.save or stopping or self._saving_is_due(totals.samples):
                self._save()
        run.checkpoints.close()
        finished = self.progress["steps"] == run.length.steps and not self.progress["evaluating"]
        return EXIT_REQUEUE if stopping and not finished else 0

    def _advance(self, batch: Batch, result: StepResult) -> None:
        self.progress["samples"] += result.totals.samples
        self.progress["steps"] += 1
        self.progress["data"] = batch.state
        self.left_out.update(batch.skipped)
        self.meter.samples += result.totals.samples
        self.meter.text_tokens += result.totals.text_tokens
        self.meter.steps += 1
        self.queued = _Queued(self.progress["steps"], batch, result)
        if self.run.ema is not None and not result.skipped:
            self.run.ema.update()

    def _settle(self) -> None:
        """See whether the last step updated anything; every rank calls it at the same place."""
        if self.queued is None:
            return
        step, self.queued = self.queued, None
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if step.result.skipped else 0
        if step.result.skipped:
            self._report_skip(step)

    def _report_skip(self, step: _Queued) -> None:
        culprits = self.run.processes.all_gather_object(self.run.step.culprits(step.batch))
        named = [f"rank {rank}: {', '.join(keys[:8])}" for rank, keys in enumerate(culprits) if keys]
        text = f"step {step.number}: the gradient is not finite, nothing was updated"
        self.tracker.warning(
            text + (f"; samples with features that are not finite: {'; '.join(named)}" if named else "")
        )
        if self.skipped_in_a_row >= self.run.config.run.max_skipped_steps:
            raise UserError(
                f"{self.skipped_in_a_row} steps in a row had a gradient that is not finite "
                "(--max-skipped-steps); the last checkpoint is whole. Lower --lr, look at the samples named "
                "above, or train with --precision fp32"
            )

    def _track(self, result: StepResult, lr: float) -> None:
        step, samples = self.progress["steps"], self.progress["samples"]
        if not (self.tracker.wants(step) or step == self.run.length.steps):
            self.tracker.advance(samples)
            return
        self._settle()
        metrics = {name: float(value) for name, value in result.losses.items()}
        metrics |= {
            "lr": lr,
            "logit_scale": float(result.logit_scale),
            "logit_scale_bound": math.exp(SCALE_BOUNDS[1]),
            "grad_norm": float(result.gradient_norm),
            "duplicate_rate": float(result.duplicate_rate),
            "peak_memory_bytes": float(peak_memory_bytes(self.run.processes.device)),
        }
        if result.logit_bias is not None:
            metrics["logit_bias"] = float(result.logit_bias)
        metrics |= self._rates() | self._recompilations()
        self.tracker.step(metrics, samples, step)

    def _rates(self) -> dict[str, float]:
        """Rates since the last reading, and what the ranks tell each other at this cadence only."""
        processes = self.run.processes
        own = self.meter.seconds["step"] / max(self.meter.steps, 1)
        rates = self.meter.read(processes.world_size)
        if self.peak is not None and self.run.flops is not None:
            forward = self.run.flops.of(rates["text_tokens_per_sample"])
            rates["mfu"] = 3 * forward * rates["samples_per_second_per_gpu"] / self.peak
        told = processes.all_gather_object((own, dict(self.left_out)))
        self.left_out.clear()
        self._report_left_out([counts for _, counts in told])
        if processes.is_distributed:
            seconds = [step_seconds for step_seconds, _ in told]
            slowest = max(range(len(seconds)), key=seconds.__getitem__)
            rates["slowest_rank"] = slowest
            rates["step_time_spread"] = seconds[slowest] / max(median(seconds), 1e-9) - 1
        return rates

    def _recompilations(self) -> dict[str, float]:
        """Graphs that torch.compile made after the first step, on the rank with most; more are warned of."""
        if self.compilations is None:
            return {}
        by_rank = self.run.processes.all_gather_object(self.compilations.again())
        if text := compilation.warning(self.recompiled, by_rank):
            self.tracker.warning(text)
        self.recompiled = max(by_rank)
        return {"recompilations": self.recompiled}

    def _report_left_out(self, counts: list[dict[str, int]]) -> None:
        total = sum(map(Counter, counts), Counter())
        if total:
            reasons = ", ".join(f"{count} {reason}" for reason, count in total.most_common())
            self.tracker.warning(f"samples left out since the last line: {reasons}")

    def _evaluate_if_due(self, step_samples: int) -> bool:
        """Whether the ranks agreed to stop in the middle of it."""
        samples, length = self.progress["samples"], self.run.length
        tasks = self.run.config.evaluation.due(
            samples - step_samples,
            samples,
            samples_per_epoch=length.samples_per_epoch,
            last=self.progress["steps"] == length.steps,
        )
        return self._evaluate(tasks)

    def _evaluate(self, tasks: Collection[Task]) -> bool:
        """Whether the ranks agreed to stop in the middle; then the run that goes on has it to do."""
        run, samples, steps = self.run, self.progress["samples"], self.progress["steps"]
        if not tasks:
            return False
        self._settle()
        self.progress["evaluating"] = sorted(tasks)
        run.processes.position.at("evaluate", steps)
        try:
            results = self._results(tasks)
        except Stopped as reason:
            log.info("%s: the evaluation is done when the run goes on", reason)
            return True
        if results:
            self.tracker.evaluation(scalars(results), samples, steps)
        for picture in (result.picture for result in results if result.picture is not None):
            self.tracker.picture("retrieval", picture, samples, steps)
        self.progress["evaluating"] = []
        self.meter.pause()
        return False

    def _results(self, tasks: Collection[Task]) -> list[Result]:
        run = self.run
        with nullcontext() if run.ema is None else run.ema.swap():
            return evaluate(
                run.engine.module,
                run.config.evaluation,
                run.config.data,
                run.image_input,
                run.tokenize,
                processes=run.processes,
                tasks=tasks,
                model_name=run.spec.name,
                pretrained=run.folder.name,
            )

    def _saving_is_due(self, step_samples: int) -> bool:
        config = self.run.config.checkpoint.resolved(self.run.length.samples_per_epoch)
        every = [self._epochs(config.save_frequency), config.save_every]
        return self._is_due(step_samples, every) or self.progress["steps"] == self.run.length.steps

    def _is_saving_time(self) -> bool:
        """Whether rank 0's clock says that --save-minutes are over."""
        minutes = self.run.config.checkpoint.save_minutes
        if minutes is None or not self.run.processes.is_primary:
            return False
        return time.monotonic() - self.saved_at >= 60 * minutes

    def _save(self) -> None:
        self._settle()
        run, own = self.run, self.progress["data"]
        run.processes.position.at("save", self.progress["steps"])
        if not run.config.parallel.use_bn_sync:
            average_statistics(run.engine.module)
        self.progress["data"] = merge_states(run.processes.all_gather_object(own))
        log.info("data: %s", account(self.progress["data"]))
        run.checkpoints.save(self.progress["samples"], run.state)
        self.progress["data"] = own
        self.saved_at = time.monotonic()

    def _epochs(self, count: int | None) -> int | None:
        return count * self.run.length.samples_per_epoch if count else None

    def _is_due(self, step_samples: int, every: list[int | None]) -> bool:
        """Whether this step crossed a multiple of one of the intervals (in samples)."""
        now = self.progress["samples"]
        return any(now // interval > (now - step_samples) // interval for interval in every if interval)
