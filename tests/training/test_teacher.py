"""A teacher is built frozen, and refused where it cannot take what the student takes."""

import json
from pathlib import Path

import pytest
import tiny
import torch

from shardclip.errors import UserError
from shardclip.training.objective import ObjectiveConfig
from shardclip.training.teacher import build_teacher


def folder_of(path: Path, kind: str, **preprocess: object) -> str:
    spec = tiny.spec(kind)
    content = {"model_cfg": spec.model_cfg, "preprocess_cfg": {**spec.preprocess_cfg, **preprocess}}
    (path / "open_clip_config.json").write_text(json.dumps(content))
    return f"local-dir:{path}"


def test_a_teacher_is_frozen_and_computes_in_the_students_precision(tmp_path: Path) -> None:
    config = ObjectiveConfig(distill_model=folder_of(tmp_path, "siglip"))
    teacher = build_teacher(config, tiny.spec(), torch.device("cpu"), torch.bfloat16)
    assert teacher is not None
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert teacher.compute_dtype == torch.bfloat16
    assert teacher.logit_bias is not None


def test_a_teacher_with_other_inputs_is_refused(tmp_path: Path) -> None:
    config = ObjectiveConfig(distill_model=folder_of(tmp_path, "clip", mean=[0.1, 0.2, 0.3]))
    with pytest.raises(UserError, match=r"mean is \[0.1, 0.2, 0.3\] there and \[0.5, 0.5, 0.5\] here"):
        build_teacher(config, tiny.spec(), torch.device("cpu"), None)


def test_weights_of_no_teacher_are_refused() -> None:
    with pytest.raises(UserError, match="--distill-pretrained needs --distill-model"):
        build_teacher(ObjectiveConfig(distill_pretrained="x.pt"), tiny.spec(), torch.device("cpu"), None)
