"""Training checkpoints of open_clip 3.3.0, written by its own trainer, are started from."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from train_states import TINY, different, open_checkpoints, state_of, step, whole

from shardclip.errors import UserError
from shardclip.models.factory import ModelSpec
from shardclip.models.weights import from_open_clip, has_text_at_root

TEXT = TINY.model_cfg["text_cfg"] | {"vocab_size": 49408}  # what open_clip's tokenizer needs
SPEC = ModelSpec("shardclip-tiny", TINY.model_cfg | {"text_cfg": TEXT}, {})
PEER = """
import sys, open_clip
from open_clip_train.main import main
open_clip.add_model_config(sys.argv[1])
main(sys.argv[2:])
"""
FLAGS = """--dataset-type synthetic --train-num-samples 8 --batch-size 4 --epochs 1 --workers 0 --warmup 1
--model shardclip-tiny --siglip --device cpu --precision fp32 --lr 1e-2 --name run"""


@pytest.fixture(scope="module")
def epoch_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of `open_clip_train.main` on made-up data, in a process of its own."""
    folder = tmp_path_factory.mktemp("peer")
    (folder / "shardclip-tiny.json").write_text(json.dumps(SPEC.model_cfg))
    command = [sys.executable, "-c", PEER, str(folder), *FLAGS.split(), "--logs", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "run" / "checkpoints" / "epoch_1.pt"


def moments_by_their_own_optimizer(path: Path) -> dict[str, torch.Tensor]:
    """What open_clip's trainer itself gives to each parameter when it resumes, by our names."""
    content = torch.load(path, weights_only=True)
    model = open_clip.CLIP(**SPEC.model_cfg)
    named = list(model.named_parameters())
    no_decay = [p for n, p in named if p.ndim < 2 or any(x in n for x in ("bn", "ln", "bias", "logit_scale"))]
    rest = [p for _, p in named if all(p is not other for other in no_decay)]
    optimizer = torch.optim.AdamW([{"params": no_decay}, {"params": rest}])
    optimizer.load_state_dict(content["optimizer"])
    ours = list(from_open_clip(dict(model.named_parameters())))
    return {
        f"optimizer.{name}.{moment}": value
        for name, (_, parameter) in zip(ours, named, strict=True)
        for moment, value in optimizer.state[parameter].items()
    }


def started_from(path: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], float]:
    state = state_of(kind, spec=SPEC)
    state.progress["samples"] = 0
    checkpoints = open_checkpoints(path.parent / "ours", resume=str(path))
    found = checkpoints.to_resume()
    assert found == path
    checkpoints.load(found, state)
    return whole(state), dict(state.progress), step(state)


@pytest.mark.parametrize(("kind", "world"), [("none", 1), ("fsdp", 2)])
def test_weights_and_moments_of_open_clips_trainer(ranks: Any, epoch_1: Path, kind: str, world: int) -> None:
    assert has_text_at_root(SPEC.model_cfg)
    expected = {f"model.{n}": v for n, v in from_open_clip(torch.load(epoch_1)).items()}
    expected |= moments_by_their_own_optimizer(epoch_1)
    for loaded, progress, loss in ranks(world).run(started_from, epoch_1, kind):
        assert different(loaded, expected) == []
        assert loaded["optimizer.visual.proj.step"] == 2
        assert progress == {"samples": 0}
        assert loss == loss


def test_moments_keyed_by_name_under_ddp_and_a_scale_of_shape_1(ranks: Any, epoch_1: Path) -> None:
    expected = moments_by_their_own_optimizer(epoch_1)
    content = torch.load(epoch_1)
    names = list(content["state_dict"])
    ours = dict(zip(from_open_clip(content["state_dict"]), names, strict=True))
    state: dict[str, dict[str, Any]] = {}
    for key, value in expected.items():
        name, _, moment = key.removeprefix("optimizer.").rpartition(".")
        is_scalar = moment != "step" and value.ndim == 0
        state.setdefault(ours[name], {})[moment] = value.reshape(1) if is_scalar else value
    path = epoch_1.with_name("named.pt")
    torch.save(content | {"optimizer": {"state": state, "param_groups": []}}, path)
    loaded, _, _ = ranks(1).run(started_from, path, "none")[0]
    assert different({k: v for k, v in loaded.items() if k.startswith("optimizer.")}, expected) == []


def test_moments_that_cannot_be_told_apart_are_left_and_that_is_said(
    epoch_1: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = torch.load(epoch_1)
    first, second = content["optimizer"]["param_groups"]
    first["params"].append(second["params"].pop(0))
    path = epoch_1.with_name("other_groups.pt")
    torch.save(content, path)
    loaded, _, _ = started_from(path, "none")
    assert not [key for key in loaded if key.startswith("optimizer.")]
    assert "moments" in caplog.text
    assert "start anew" in caplog.text


def test_latest_beside_open_clips_alone_is_refused_and_names_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = open_checkpoints(folder, resume="latest")
    assert checkpoints.to_resume() is None
    for name in ("epoch_9.pt", "epoch_10.pt", "epoch_old.pt"):
        (folder / name).touch()
    with pytest.raises(UserError, match=rf"Give --resume {folder}/epoch_10.pt .* counted from 0"):
        checkpoints.to_resume()
    (folder / "epoch_latest.pt").touch()
    with pytest.raises(UserError, match=f"{folder}/epoch_latest.pt"):
        checkpoints.to_resume()
    checkpoints.save(4, state_of("none"))
    checkpoints.wait()
    assert checkpoints.to_resume() == folder / "samples-000000000004"
