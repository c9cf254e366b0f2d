"""One optimizer step: encode, gather, loss, backward, clip, update.

Whatever the ranks, the engine and the number of micro-batches, the gradient is that of one process on the
whole batch. The loss is a function of features, so it is computed once per step; with several micro-batches
the features are encoded twice, first without a graph (Gao et al. 2021, https://arxiv.org/abs/2101.06983).

The host only queues what a device is to do and waits for none of it: what depends on a batch's captions and
counts is worked out on the CPU before, and what depends on the gradient is decided on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardclip.models.dual_encoder import DualEncoder, Encoded
from shardclip.models.losses.caption import caption_cross_entropy, count_targets
from shardclip.models.losses.gather import GlobalBatch, duplicate_rate, gather, pair_rows
from shardclip.models.packing import PackedTexts
from shardclip.models.transfer import sent
from shardclip.training.agreement import Totals, told
from shardclip.training.arriving import Arriving
from shardclip.training.data.batch import Batch
from shardclip.training.distributed import Processes
from shardclip.training.objective import Objective, Teacher
from shardclip.training.optimizer import clean_name
from shardclip.training.parallel import Engine
from shardclip.training.statistics import batch_norms, statistics_kept
from shardclip.training.update import Update

SCALE_BOUNDS = (0.0, math.log(100.0))
"""Bounds of the logarithm of the scale, as in the CLIP paper (https://arxiv.org/abs/2103.00020, 2.5)."""


@dataclass
class StepResult:
    """What a step did, for the log; every figure is that of the whole batch. Reading one waits for it."""

    totals: Totals
    losses: dict[str, Tensor]
    gradient_norm: Arriving
    """Of the whole gradient, before clipping."""
    logit_scale: Tensor
    logit_bias: Tensor | None
    duplicate_rate: Tensor
    """Share of samples whose caption occurs more than once in the batch."""

    @property
    def skipped(self) -> bool:
        """Whether the gradient was not finite, so that nothing was updated; the same on every rank."""
        return not math.isfinite(float(self.gradient_norm))


@dataclass
class TrainingStep:
    """Everything a step needs; call it with a batch."""

    engine: Engine
    objective: Objective
    update: Update
    processes: Processes
    pixels: Callable[[Tensor], Tensor]
    """uint8 images [I, 3, H, W] to what the image tower wants."""
    blank_text: Tensor
    """Token ids [1, L] of an empty caption, on the CPU: stands in where a micro-batch has no text."""
    blank_image: Tensor
    """[1, 3, H, W] uint8: stands in where a micro-batch has no image."""
    pad_id: int = 0
    accumulation: int = 1
    teacher: DualEncoder | None = None

    def __post_init__(self) -> None:
        module = self.engine.module
        self.encoder = cast(
            DualEncoder, module.module if isinstance(module, DistributedDataParallel) else module
        )
        norms = batch_norms(self.engine.module)
        self.image_norms = [norm for name, norm in norms.items() if name.startswith("visual.")]
        self.text_norms = [norm for name, norm in norms.items() if not name.startswith("visual.")]

    def __call__(self, batch: Batch, totals: Totals | None = None) -> StepResult:
        """Train on this rank's `batch`; every rank calls it. The learning rate is set before.

        Args:
            batch: this rank's samples.
            totals: what `agree` said of this step; asked for here if not given.
        """
        totals = totals or self.agree(batch)
        losses, rate = self._gradients(batch.split(self.accumulation), totals)
        norm = self.update(self._drop_unused(totals))
        with torch.no_grad():
            scalars = self.engine.module(clamp_scale=SCALE_BOUNDS)
        return StepResult(
            totals,
            losses,
            Arriving(norm),
            scalars.logit_scale,
            None if scalars.logit_bias is None else scalars.logit_bias.detach(),
            rate,
        )

    def agree(self, batch: Batch | None, save: bool = False) -> Totals:
        """Tell each other what the ranks hold and wish, on the CPU; every rank calls it before a step.

        Args:
            batch: this rank's part of the step; None if it has none and only wants to be heard.
            save: whether this rank wants a checkpoint after the step.
        """
        held = [0] * 6 if batch is None else self._holdings(batch)
        return told(held, self.processes, ready=batch is not None, save=save)

    def _holdings(self, batch: Batch) -> list[int]:
        pairs = len(pair_rows(batch.image_sample, batch.text_sample, batch.samples)[0])
        targets = count_targets(batch.texts[:, 1:], self.pad_id) if self.objective.is_captioning else 0
        mark = self.encoder.end_mark
        tokens = batch.texts.numel() if mark is None else int(mark.lengths(batch.texts).sum())
        return [len(batch.images), len(batch.texts), batch.samples, pairs, targets, tokens]

    def _gradients(self, micro_batches: list[Batch], totals: Totals) -> tuple[dict[str, Tensor], Tensor]:
        """Leave the whole batch's gradient on the parameters; the losses, and the rate of duplicates."""
        passes = [_Pass(self, micro) for micro in micro_batches]
        once = len(passes) == 1
        encoded = [p.encode(captions=self.objective.is_captioning) if once else p.preview() for p in passes]
        leaves, losses, rate = self._feature_losses(encoded, passes, totals)
        caption_loss = torch.zeros((), device=self.processes.device)
        for index, current in enumerate(passes):
            last = index == len(passes) - 1
            with self.engine.synchronising(last):
                out = (
                    encoded[0] if once else current.encode(captions=self.objective.is_captioning, again=True)
                )
                caption_loss += self._backward(out, current, leaves, last, totals)
            leaves = leaves.after(current)
        if self.objective.is_captioning:
            if self.processes.is_distributed:
                dist.all_reduce(caption_loss)
            losses["caption_loss"] = caption_loss
        losses["loss"] = torch.stack(list(losses.values())).sum()
        return losses, rate

    def _feature_losses(
        self, encoded: Sequence[Encoded], passes: Sequence[_Pass], totals: Totals
    ) -> tuple[_Leaves, dict[str, Tensor], Tensor]:
        """Gradients at this rank's features, scale and bias; losses; rate of duplicate captions."""
        scale, bias = encoded[0].logit_scale, encoded[0].logit_bias
        at = _Leaves(
            torch.cat([p.real_images(out) for p, out in zip(passes, encoded, strict=True)]).detach(),
            torch.cat([p.real_texts(out) for p, out in zip(passes, encoded, strict=True)]).detach(),
            scale.detach(),
            None if bias is None else bias.detach(),
        )
        wanted = [leaf.requires_grad_() for leaf in at if leaf is not None]
        whole = gather(at.images, at.texts, *_sample_numbers(passes), counts=totals.ranks)
        losses = self.objective.feature_losses(
            at.images, at.texts, at.scale, at.bias, whole, self._teach(passes, whole)
        )
        total = torch.stack(list(losses.values())).sum()
        found = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        detached = {name: value.detach() for name, value in losses.items()}
        return _Leaves(*found), detached, duplicate_rate(whole)

    @torch.no_grad()
    def _teach(self, passes: Sequence[_Pass], whole: GlobalBatch) -> Teacher | None:
        if self.teacher is None:
            return None
        encoded = [self.teacher(p.pixels(), p.texts_for(self.teacher)) for p in passes]
        images = torch.cat([p.real_images(out) for p, out in zip(passes, encoded, strict=True)])
        texts = torch.cat([p.real_texts(out) for p, out in zip(passes, encoded, strict=True)])
        return Teacher(whole.with_features(images, texts), encoded[0].logit_scale, encoded[0].logit_bias)

    def _backward(self, out: Encoded, current: _Pass, leaves: _Leaves, last: bool, totals: Totals) -> Tensor:
        """Backward of one micro-batch; its share of the caption loss."""
        loss_scale = 1.0 if self.update.loss_scale is None else self.update.loss_scale.value
        factor = self.engine.gradient_divisor * loss_scale
        # Scale and bias get the global gradient on every rank, once: equal values, which averaging keeps.
        once = loss_scale if last else 0.0
        seeds: list[tuple[Tensor | None, Tensor | None]] = [
            (out.image_features, _fill(leaves.images, current.image_rows, out.image_features) * factor),
            (out.text_features, _fill(leaves.texts, current.text_rows, out.text_features) * factor),
            (out.logit_scale, leaves.scale * once),
            (out.logit_bias, None if leaves.bias is None else leaves.bias * once),
        ]
        caption_loss = torch.zeros((), device=self.processes.device)
        if out.caption_logits is not None:
            loss = self.objective.caption_weight * caption_cross_entropy(
                out.caption_logits, current.caption_labels, totals.target_tokens, pad_id=self.pad_id
            )
            caption_loss = loss.detach()
            seeds.append((loss, torch.ones_like(loss) * factor))
        roots = [(t, seed) for t, seed in seeds if t is not None and seed is not None and t.requires_grad]
        current.backward(roots)
        return caption_loss

    def _drop_unused(self, totals: Totals) -> list[nn.Parameter]:
        """The trainable parameters; those that no sample of any rank was for lose their (zero) gradient.

        A zero gradient is not the absence of one: AdamW would decay the weights and move by old momentum.
        """
        named = [(clean_name(n), p) for n, p in self.engine.module.named_parameters() if p.requires_grad]
        for name, parameter in named:
            only_captions = name.startswith("text_decoder.")
            if totals.pairs == 0 or (only_captions and totals.target_tokens == 0):
                parameter.grad = None
        return [parameter for _, parameter in named]

    def culprits(self, batch: Batch) -> list[str]:
        """Keys of this rank's samples whose features alone are not finite; every rank calls it."""
        with torch.no_grad(), _evaluating(self.engine.module):
            current = _Pass(self, batch)
            out = current.encode()
        images, texts = (
            features.isfinite().all(dim=1).cpu()
            for features in (current.real_images(out), current.real_texts(out))
        )
        bad = {*batch.image_sample[~images].tolist(), *batch.text_sample[~texts].tolist()}
        return [batch.keys[sample] for sample in sorted(bad)]


class _Leaves(NamedTuple):
    """Where the loss begins: this rank's features (of the micro-batches still to come), scale and bias."""

    images: Tensor
    texts: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def after(self, done: _Pass) -> _Leaves:
        return self._replace(images=self.images[done.image_rows :], texts=self.texts[done.text_rows :])


class _Pass:
    """The forward passes of one micro-batch: equal on all ranks, whatever each of them holds."""

    def __init__(self, step: TrainingStep, batch: Batch) -> None:
        """Send a batch to the device; its captions are read before, on the CPU, to lay them out."""
        self.step, self.batch = step, batch
        self.image_rows, self.text_rows = len(batch.images), len(batch.texts)
        self._tokens = batch.texts if self.text_rows else step.blank_text
        self.texts = self.texts_for(step.encoder)
        self._images = sent(batch.images, step.processes.device) if self.image_rows else step.blank_image
        self._random_state: tuple[Tensor, Tensor | None] | None = None

    def pixels(self) -> Tensor:
        """The pictures as the image tower wants them; made anew, as they are four times as large as bytes."""
        return self.step.pixels(self._images)

    def texts_for(self, encoder: DualEncoder) -> Tensor | PackedTexts:
        """The captions on the device, as a model takes them."""
        return encoder.text_input(self._tokens, self.step.processes.device)

    def encode(self, *, captions: bool = False, again: bool = False) -> Encoded:
        """Forward with graph; `again` repeats the random numbers of `preview` and leaves statistics alone."""
        if again:
            self._restore_random_state()
        with self._statistics(kept=again):
            return self.step.engine.module(
                self.pixels(), self.texts, caption_pairs=self._pairs if captions else None
            )

    def backward(self, roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Backward from tensors with their gradients; what is recomputed in it does not count twice."""
        with self._statistics(kept=True):
            torch.autograd.backward([t for t, _ in roots], [seed.to(t.dtype) for t, seed in roots])

    @contextmanager
    def _statistics(self, kept: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for norms, rows in (
                (self.step.image_norms, self.image_rows),
                (self.step.text_norms, self.text_rows),
            ):
                if kept or not rows:
                    stack.enter_context(statistics_kept(norms, blank=not rows))
            yield

    def preview(self) -> Encoded:
        """Features without a graph; remembers the random state for `encode(again=True)`."""
        device = self.step.processes.device
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._random_state = (torch.get_rng_state(), on_device)
        with torch.no_grad():
            return self.encode()

    def _restore_random_state(self) -> None:
        assert self._random_state is not None
        on_host, on_device = self._random_state
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self.step.processes.device)

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Rows of the images and texts that belong together; the blank rows where there is none."""
        device = self.step.processes.device
        if not self._has_pair:
            blank = torch.zeros(1, dtype=torch.int64, device=device)
            return blank, blank
        image_rows, text_rows = self._real_pairs
        return sent(image_rows, device), sent(text_rows, device)

    @property
    def caption_labels(self) -> Tensor:
        """[P, L - 1] target tokens of the pairs; all padding where the pair is a blank."""
        assert isinstance(self.texts, Tensor)
        labels = self.texts[self._pairs[1], 1:]
        return labels if self._has_pair else torch.full_like(labels, self.step.pad_id)

    @cached_property
    def _real_pairs(self) -> tuple[Tensor, Tensor]:
        return pair_rows(self.batch.image_sample, self.batch.text_sample, self.batch.samples)

    @property
    def _has_pair(self) -> bool:
        return len(self._real_pairs[0]) > 0

    def real_images(self, out: Encoded) -> Tensor:
        """The image features without the blank row."""
        assert out.image_features is not None
        return out.image_features[: self.image_rows]

    def real_texts(self, out: Encoded) -> Tensor:
        """The text features without the blank row."""
        assert out.text_features is not None
        return out.text_features[: self.text_rows]


def _sample_numbers(passes: Sequence[_Pass]) -> tuple[Tensor, Tensor, Tensor]:
    """Sample of each image, sample of each text and caption id of each sample, of all passes; on the CPU."""
    images, texts, captions, offset = [], [], [], 0
    for current in passes:
        images.append(current.batch.image_sample + offset)
        texts.append(current.batch.text_sample + offset)
        captions.append(current.batch.caption_id)
        offset += current.batch.samples
    return torch.cat(images), torch.cat(texts), torch.cat(captions)


def _fill(gradient: Tensor, rows: int, like: Tensor | None) -> Tensor:
    """The first `rows` rows of `gradient`; zeros in the shape of a blank row if there are none."""
    assert like is not None
    return gradient[:rows] if rows else torch.zeros_like(like)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
