"""The frozen model that a distillation learns from: whole on every rank, in the student's precision."""

from __future__ import annotations

import torch

from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.factory import ModelConfig, ModelSpec
from shardclip.training.objective import ObjectiveConfig


def build_teacher(
    config: ObjectiveConfig, student: ModelSpec, device: torch.device, compute_dtype: torch.dtype | None
) -> DualEncoder | None:
    """The teacher that the flags name, in evaluation mode; None if they name none.

    Raises:
        UserError: it cannot be built, or does not take the student's images and token ids.
    """
    if config.distill_model is None:
        if config.distill_pretrained is not None:
            raise UserError("--distill-pretrained needs --distill-model")
        return None
    flags = ModelConfig(model=config.distill_model, pretrained=config.distill_pretrained)
    spec = factory.resolve(flags)
    differences = [
        f"{what} is {theirs} there and {ours} here"
        for what, theirs, ours in _inputs(spec, student)
        if theirs != ours
    ]
    if differences:
        raise UserError(
            f"--distill-model {config.distill_model} does not take what the student takes: "
            f"{'; '.join(differences)}"
        )
    teacher = factory.build(spec, flags).to(device).eval().requires_grad_(False)
    teacher.compute_dtype = compute_dtype
    return teacher


def _inputs(teacher: ModelSpec, student: ModelSpec) -> list[tuple[str, object, object]]:
    rows: list[tuple[str, object, object]] = [
        (key, teacher.preprocess_cfg.get(key), student.preprocess_cfg.get(key))
        for key in ("size", "mean", "std")
    ]
    for key, usual in (("context_length", 77), ("vocab_size", 49408), ("hf_tokenizer_name", None)):
        theirs, ours = (spec.model_cfg["text_cfg"].get(key, usual) for spec in (teacher, student))
        rows.append((key, theirs, ours))
    return rows
