"""Locking on every kind of tower: the tensors that stay open written out by hand, the locked ones unmoved."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import towers
from braceexpand import braceexpand
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardclip.errors import UserError
from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.layers import layer_groups
from shardclip.models.locking import LockConfig, lock, trainable_table
from shardclip.training.optimizer import OptimizerConfig, build_optimizer, clean_name, plan_parameters

_BLOCK = "{attn.in_proj_{weight,bias},{ln_{1,2},attn.out_proj,mlp.c_{fc,proj}}.{weight,bias}}"
IMAGE_OPEN = {
    "native": (
        2,
        ["visual.proj", "visual.ln_post.{weight,bias}", f"visual.transformer.resblocks.1.{_BLOCK}"],
    ),
    "resnet": (
        2,
        [
            "visual.attnpool.{positional_embedding,{k,q,v,c}_proj.{weight,bias}}",
            "visual.layer4.0.{conv{1,2,3}.weight,bn{1,2,3}.{weight,bias}}",
            "visual.layer4.0.downsample.{0.weight,1.weight,1.bias}",
        ],
    ),
    "timm": (
        2,
        [
            "visual.head.proj.weight",
            "visual.trunk.norm.{weight,bias}",
            "visual.trunk.blocks.5.{norm{1,2},attn.{qkv,proj},mlp.fc{1,2}}.{weight,bias}",
        ],
    ),
    "coca": (
        2,
        [
            "visual.{proj,ln_post.{weight,bias}}",
            "visual.attn_pool.{query,ln_{q,k}.{weight,bias}}",
            "visual.attn_pool.attn.{in_proj_{weight,bias},out_proj.{weight,bias}}",
        ],
    ),
}
"""Kind of image tower -> unlocked groups, parameters that stay open."""
TEXT_OPEN = {
    "native": (
        2,
        ["text.{text_projection,ln_final.{weight,bias}}", f"text.transformer.resblocks.1.{_BLOCK}"],
    ),
    "coca": (2, ["text.{text_projection,ln_final.{weight,bias}}", f"text.transformer.resblocks.1.{_BLOCK}"]),
    "bert": (
        3,
        [
            "text.proj.weight",
            "text.transformer.pooler.dense.{weight,bias}",
            "text.transformer.encoder.layer.1.attention.self.{query,key,value}.{weight,bias}",
            "text.transformer.encoder.layer.1.{attention.output,output}.{dense,LayerNorm}.{weight,bias}",
            "text.transformer.encoder.layer.1.intermediate.dense.{weight,bias}",
        ],
    ),
    "t5": (
        2,
        [
            "text.proj.weight",
            "text.transformer.final_layer_norm.weight",
            "text.transformer.block.1.layer.0.{SelfAttention.{q,k,v,o},layer_norm}.weight",
            "text.transformer.block.1.layer.1.{DenseReluDense.{wi_0,wi_1,wo},layer_norm}.weight",
        ],
    ),
}
"""Kind of text tower -> unlocked groups that hold one block, parameters that stay open."""


def _expand(patterns: list[str]) -> set[str]:
    return {name for pattern in patterns for name in braceexpand(pattern)}


def _open(model: nn.Module, tower: str) -> set[str]:
    return {n for n, p in model.named_parameters() if p.requires_grad and n.startswith(f"{tower}.")}


def _train(model: DualEncoder, kind: str, steps: int) -> torch.optim.Optimizer:
    config = OptimizerConfig(lr=0.01)
    optimizer = build_optimizer(model, plan_parameters(model, config), config)
    for step in range(steps):
        optimizer.zero_grad()
        out = model(*towers.inputs(kind, seed=step))
        (
            out.logit_scale * F.cosine_similarity(out.image_features, out.text_features.roll(1, 0))
        ).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", towers.KINDS)
def test_every_parameter_is_in_exactly_one_group(kind):
    for _, tower in towers.model(kind).named_children():
        grouped = [name for group in layer_groups(tower) for name in group]
        assert sorted(grouped) == sorted(name for name, _ in tower.named_parameters())


@pytest.mark.parametrize("kind", IMAGE_OPEN)
def test_b60_image_tower_with_its_top_open(kind):
    groups, expected = IMAGE_OPEN[kind]
    model = towers.model(kind)
    lock(model, LockConfig(lock_image=True, lock_image_unlocked_groups=groups))
    assert _open(model, "visual") == _expand(expected)
    assert all(p.requires_grad for p in (*model.text.parameters(), model.logit_scale))


@pytest.mark.parametrize("kind", TEXT_OPEN)
def test_b60_text_tower_with_one_open_block_moves_nothing_else(kind):
    groups, expected = TEXT_OPEN[kind]
    model = towers.model(kind)
    lock(model, LockConfig(lock_text=True, lock_text_unlocked_layers=groups))
    assert _open(model, "text") == _expand(expected)
    before = {name: p.detach().clone() for name, p in model.text.named_parameters()}
    _train(model, kind, steps=10)
    moved = {f"text.{name}" for name, p in model.text.named_parameters() if not torch.equal(p, before[name])}
    assert moved <= _expand(expected)
    assert {"text.text_projection", "text.proj.weight"} & moved


@pytest.mark.parametrize("kind", towers.KINDS)
def test_b13_locked_towers_hold_no_gradient_and_no_state(kind):
    model = towers.model(kind)
    lock(model, LockConfig(lock_image=True, lock_patterns=("text.*",)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = OptimizerConfig(lr=0.01)
    optimizer = build_optimizer(model, plan_parameters(model, config), config)
    locked = [name for name in before if name.startswith(("visual.", "text."))]
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert held == {p for name, p in model.named_parameters() if name not in locked}
    optimizer = _train(model, kind, steps=10)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], before[name]) for name in locked)
    assert all(parameters[name].grad is None for name in locked)
    assert not torch.equal(model.logit_scale, before["logit_scale"])
    assert all(parameters[name] not in optimizer.state for name in locked)


def _twenty_steps(engine: str) -> tuple[list[float], bool, list[str]]:
    """With all but the last image block locked: losses, whether what is locked stayed, what has state."""
    model = towers.model("native")
    lock(model, LockConfig(lock_image=True, lock_image_unlocked_groups=2))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    config = OptimizerConfig(lr=1e-3)
    plan = plan_parameters(model, config)
    if engine == "fsdp":
        for block in (*model.visual.transformer.resblocks, *model.text.transformer.resblocks):
            fully_shard(block)
        for module in (model.visual, model.text):
            fully_shard(module)
        wrapped: nn.Module = fully_shard(model, ignored_params={model.logit_scale})
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = build_optimizer(wrapped, plan, config)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        out = wrapped(*towers.inputs("native", samples=4, seed=2 * step + dist.get_rank()))
        # The scale has the same gradient on every rank, as the step sees to.
        loss = F.mse_loss(out.image_features, out.text_features, reduction="sum") + 0.01 * out.logit_scale
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    names = {p: clean_name(name) for name, p in wrapped.named_parameters()}
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for p, n in names.items()}
    stayed = all(torch.equal(whole[name], tensor) for name, tensor in before.items())
    stayed = stayed and all(p.grad is None for p, name in names.items() if name in before)
    return losses, stayed, sorted(names[p] for p in optimizer.state)


def test_b13_partly_locked_tower_is_the_same_sharded_and_replicated(ranks):
    replicated, sharded = (ranks(2).run(_twenty_steps, engine) for engine in ("ddp", "fsdp"))
    for (ddp_losses, ddp_stayed, ddp_state), (losses, stayed, state) in zip(replicated, sharded, strict=True):
        assert ddp_stayed
        assert stayed
        assert losses == pytest.approx(ddp_losses, rel=1e-6)
        assert state == ddp_state
        assert {n for n in state if n.startswith("visual.")} == _expand(IMAGE_OPEN["native"][1])


def _norms(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: b.clone() for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var"))}


def _statistics_after_training(wrap: str) -> set[str]:
    """Names of the running statistics that moved in a training step, with all but the last block locked."""
    model = towers.model("resnet")
    lock(
        model,
        LockConfig(lock_image=True, lock_image_unlocked_groups=2, lock_image_freeze_bn_stats=True),
    )
    before = _norms(model.visual)
    wrapped: nn.Module = DistributedDataParallel(model) if wrap == "ddp" else model
    if wrap == "fsdp":
        fully_shard(model.visual)
    wrapped.eval()
    wrapped.train()
    wrapped(towers.inputs("resnet", samples=4)[0])
    return {name for name, value in _norms(model.visual).items() if not torch.equal(value, before[name])}


_MOVED = {"layer4.0.bn{1,2,3}.running_{mean,var}", "layer4.0.downsample.1.running_{mean,var}"}


def test_statistics_of_the_locked_part_stay():
    assert _statistics_after_training("none") == _expand(list(_MOVED))


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_statistics_of_the_locked_part_stay_when_wrapped(ranks, engine):
    for moved in ranks(2).run(_statistics_after_training, engine):
        assert moved == _expand(list(_MOVED))


def test_statistics_move_unless_they_are_frozen():
    model = towers.model("resnet")
    lock(model, LockConfig(lock_image=True))
    before = _norms(model)
    model.train()
    model(towers.inputs("resnet", samples=4)[0])
    assert all(not torch.equal(value, before[name]) for name, value in _norms(model).items())


def test_frozen_statistics_change_no_name_in_the_state_dict():
    plain, locked = towers.model("resnet"), towers.model("resnet")
    lock(locked, LockConfig(lock_image=True, lock_image_freeze_bn_stats=True))
    assert list(locked.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("kind", ["native", "bert", "t5"])
def test_norms_of_a_locked_text_tower_can_train(kind):
    model = towers.model(kind)
    lock(model, LockConfig(lock_text=True, lock_text_freeze_layer_norm=False))
    norms = {n for n, _ in model.text.named_parameters() if ".ln_" in f".{n}" or "norm" in n.lower()}
    assert len(norms) >= 5
    assert _open(model, "text") == {f"text.{name}" for name in norms}


def test_patterns_lock_any_tower():
    model = towers.model("coca")
    lock(model, LockConfig(lock_patterns=("text_decoder.resblocks.0.*", "*.ln_final.bias")))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == _expand(
        [f"text_decoder.resblocks.0.{_BLOCK}", "text_decoder.ln_final.bias", "text.ln_final.bias"]
    )


def test_what_a_tower_froze_itself_stays_frozen():
    model = towers.model("native")
    model.visual.positional_embedding.requires_grad_(False)
    lock(model, LockConfig(lock_image=True, lock_image_unlocked_groups=4))
    assert not model.visual.positional_embedding.requires_grad
    assert model.visual.conv1.weight.requires_grad


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"lock_image": True, "lock_image_unlocked_groups": 9},
            r"--lock-image-unlocked-groups 9: the tower \(VisionTransformer\) has 4 layer groups",
        ),
        (
            {"lock_text": True, "lock_text_unlocked_layers": 5},
            r"--lock-text-unlocked-layers 5: the tower \(TextTransformer\) has 4 layer groups",
        ),
        ({"lock_text": True, "lock_text_unlocked_layers": -1}, "must be 0 or more"),
        ({"lock_image_unlocked_groups": 1}, "need --lock-image"),
        ({"lock_text_freeze_layer_norm": False}, "need --lock-text"),
        ({"lock_patterns": ("visual.conv*.weights",)}, "nearest are visual.conv1.weight"),
    ],
)
def test_impossible_locks_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        lock(towers.model("native"), LockConfig(**config))


def test_unknown_tower_says_what_to_do():
    model = DualEncoder(nn.Linear(2, 2), nn.Linear(2, 2), 1.0)
    lock(model, LockConfig(lock_image=True))
    assert not model.visual.weight.requires_grad
    with pytest.raises(UserError, match=r"layers of a Linear are not known.*--lock-patterns"):
        lock(model, LockConfig(lock_text=True, lock_text_unlocked_layers=1))


def test_tower_of_one_s_own_declares_its_layers():
    tower = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    tower.group_matcher = lambda: {"stem": r"^0", "blocks": r"^(\d+)"}
    assert layer_groups(tower) == [[f"{i}.weight", f"{i}.bias"] for i in range(3)]


def test_table_counts_what_trains():
    model = towers.model("native")
    lock(model, LockConfig(lock_image=True, lock_image_unlocked_groups=1))
    rows = trainable_table(model)
    assert [row.group for row in rows] == [
        "visual[0] class_embedding + 3",
        "visual[1] transformer.resblocks.0",
        "visual[2] transformer.resblocks.1 + 1",
        "visual[3] proj",
        "text[0] positional_embedding + 1",
        "text[1] transformer.resblocks.0",
        "text[2] transformer.resblocks.1 + 1",
        "text[3] text_projection",
        "logit_scale",
    ]
    assert [row.trainable > 0 for row in rows] == [False] * 3 + [True] * 6
    assert (rows[3].trainable, rows[3].frozen) == (64 * 32, 0)
    assert sum(row.trainable + row.frozen for row in rows) == sum(p.numel() for p in model.parameters())
