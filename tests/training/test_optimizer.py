"""Decay sets written out by hand for every kind of tower; groups and gradient norms under real engines."""

from functools import cache

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
import towers
from braceexpand import braceexpand
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardclip.errors import UserError
from shardclip.models.locking import LockConfig, lock
from shardclip.training.optimizer import (
    OptimizerConfig,
    build_optimizer,
    clean_name,
    gradient_norm,
    plan_parameters,
    scale_gradients,
)
from shardclip.training.update import overshoot

_BLOCK = "{ln_{1,2}.{weight,bias},attn.in_proj_bias,attn.out_proj.bias,mlp.c_{fc,proj}.bias}"
_NATIVE_IMAGE = [
    "visual.{class_embedding,positional_embedding}",
    "visual.ln_{pre,post}.{weight,bias}",
    f"visual.transformer.resblocks.{{0,1}}.{_BLOCK}",
]
_NATIVE_TEXT = [
    "text.positional_embedding",
    "text.ln_final.{weight,bias}",
    f"text.transformer.resblocks.{{0,1}}.{_BLOCK}",
]
NO_DECAY = {
    "native": [*_NATIVE_IMAGE, *_NATIVE_TEXT],
    "resnet": [
        "visual.bn{1,2,3}.{weight,bias}",
        "visual.layer{1,2,3,4}.0.{bn{1,2,3},downsample.1}.{weight,bias}",
        "visual.attnpool.{positional_embedding,{k,q,v,c}_proj.bias}",
        *_NATIVE_TEXT,
    ],
    "timm": [
        "visual.trunk.{cls_token,pos_embed,patch_embed.proj.bias}",
        "visual.trunk.blocks.{0..5}.{norm{1,2}.{weight,bias},attn.{qkv,proj}.bias,mlp.fc{1,2}.bias}",
        "visual.trunk.norm.{weight,bias}",
        *_NATIVE_TEXT,
    ],
    "bert": [
        *_NATIVE_IMAGE,
        "text.transformer.embeddings.{position_embeddings.weight,token_type_embeddings.weight}",
        "text.transformer.embeddings.LayerNorm.{weight,bias}",
        "text.transformer.encoder.layer.{0,1}.attention.self.{query,key,value}.bias",
        "text.transformer.encoder.layer.{0,1}.{attention.output,intermediate,output}.dense.bias",
        "text.transformer.encoder.layer.{0,1}.{attention.output,output}.LayerNorm.{weight,bias}",
        "text.transformer.pooler.dense.bias",
    ],
    "t5": [
        *_NATIVE_IMAGE,
        "text.transformer.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "text.transformer.block.{0,1}.layer.{0,1}.layer_norm.weight",
        "text.transformer.final_layer_norm.weight",
    ],
    "coca": [
        *_NATIVE_IMAGE,
        "visual.attn_pool.{attn.in_proj_bias,attn.out_proj.bias,ln_{q,k}.{weight,bias}}",
        *_NATIVE_TEXT,
        "text.cls_emb",
        f"text_decoder.{{resblocks,cross_attn}}.{{0,1}}.{_BLOCK}",
        "text_decoder.cross_attn.{0,1}.ln_1_kv.{weight,bias}",
        "text_decoder.ln_final.{weight,bias}",
    ],
}


def _expand(patterns: list[str]) -> set[str]:
    return {name for pattern in patterns for name in braceexpand(pattern)}


@pytest.mark.parametrize("kind", towers.KINDS)
def test_no_decay_set_is_the_one_written_out(kind):
    model = towers.model(kind)
    plan = plan_parameters(model, OptimizerConfig())
    assert set(plan.parameters) == {name for name, _ in model.named_parameters()}
    without = {name for name, planned in plan.parameters.items() if not planned.decay}
    assert without == _expand(NO_DECAY[kind]) | {"logit_scale"}


def test_declared_names_and_globs_of_one_s_own_are_excluded():
    model = towers.model("native")
    model.visual.transformer.no_weight_decay = lambda: {"resblocks.0.mlp.c_fc.weight", "absent"}
    plan = plan_parameters(model, OptimizerConfig(wd_exclude=("text.token_emb*", "*.1.attn.in_proj_weight")))
    without = {name for name, planned in plan.parameters.items() if not planned.decay}
    assert without - _expand(NO_DECAY["native"]) == {
        "logit_scale",
        "visual.transformer.resblocks.0.mlp.c_fc.weight",
        "text.token_embedding.weight",
        "visual.transformer.resblocks.1.attn.in_proj_weight",
        "text.transformer.resblocks.1.attn.in_proj_weight",
    }


@pytest.mark.parametrize(
    ("glob", "nearest"),
    [
        ("text.tokn_embedding.weight", "the nearest are text.token_embedding.weight"),
        ("token_embedding", r"\*token_embedding\* would match"),
    ],
)
def test_glob_that_matches_nothing_names_the_nearest(glob, nearest):
    with pytest.raises(UserError, match=rf"--wd-exclude '{glob}' matches no parameter; .*{nearest}"):
        plan_parameters(towers.model("native"), OptimizerConfig(wd_exclude=(glob,)))


def test_plan_prints_counts_by_group_and_every_name():
    model = tiny.build("siglip")
    plan = plan_parameters(model, OptimizerConfig())
    table = plan.table()
    assert [group for group, _, _ in table] == ["decay", "no-decay", "scale"]
    assert table[2] == ("scale", 2, 2)
    assert sum(numbers for _, _, numbers in table) == sum(p.numel() for p in model.parameters())
    lines = plan.listing().splitlines()
    assert sorted(line.strip() for line in lines if line.startswith("  ")) == sorted(plan.parameters)


def test_b30_scale_and_bias_never_decay():
    model = tiny.build("siglip")
    config = OptimizerConfig(lr=0.1, wd=0.5)
    optimizer = build_optimizer(model, plan_parameters(model, config), config)
    (group,) = (g for g in optimizer.param_groups if g["name"] == "scale")
    assert group["weight_decay"] == 0.0
    assert [id(p) for p in group["params"]] == [id(model.logit_scale), id(model.logit_bias)]
    before = [p.clone() for p in (model.logit_scale, model.logit_bias, model.visual.proj)]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model.logit_scale, before[0])
    assert torch.equal(model.logit_bias, before[1])
    assert torch.allclose(model.visual.proj, before[2] * (1 - 0.1 * 0.5), rtol=1e-6)


def test_layer_decay_falls_by_the_factor_with_each_group():
    config = OptimizerConfig(image_layer_decay=0.5, text_layer_decay=0.1)
    plan = plan_parameters(towers.model("native"), config)
    scales = {name: planned.lr_scale for name, planned in plan.parameters.items()}
    assert [
        scales[f"visual.{name}"]
        for name in (
            "conv1.weight",
            "transformer.resblocks.0.ln_1.bias",
            "transformer.resblocks.1.ln_1.bias",
            "proj",
        )
    ] == [0.125, 0.25, 0.5, 1.0]
    assert scales["text.token_embedding.weight"] == pytest.approx(1e-3)
    assert scales["text.text_projection"] == scales["logit_scale"] == 1.0


@pytest.mark.parametrize(
    ("opt", "kind"), [("adamw", "AdamW"), ("nadamw", "NAdam"), ("sgd", "SGD"), ("timm/lamb", "Lamb")]
)
def test_each_optimizer_is_built_and_steps(opt, kind):
    model = towers.model("native")
    config = OptimizerConfig(opt=opt, lr=0.01)
    optimizer = build_optimizer(model, plan_parameters(model, config), config)
    assert type(optimizer).__name__ == kind
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0, 0.0]
    before = model.visual.proj.clone()
    out = model(*towers.inputs("native"))
    (out.image_features * out.text_features).sum().backward()
    optimizer.step()
    assert not torch.equal(model.visual.proj, before)


def test_adamw_is_fused_and_takes_arguments_with_a_second_equals_sign():
    model = towers.model("native")
    config = OptimizerConfig(opt_kwargs=("amsgrad=True",))
    optimizer = build_optimizer(model, plan_parameters(model, config), config)
    assert optimizer.defaults["fused"] is True
    assert optimizer.defaults["amsgrad"] is True
    wrong = OptimizerConfig(opt_kwargs=("mode=a=b",))
    with pytest.raises(UserError, match="unexpected keyword argument 'mode'"):
        build_optimizer(model, plan_parameters(model, wrong), wrong)


def test_timm_optimizers_get_the_moments_of_the_flags():
    model = towers.model("native")
    config = OptimizerConfig(opt="timm/adamw", beta2=0.9, eps=0.1)
    optimizer = build_optimizer(model, plan_parameters(model, config), config)
    assert all((g["betas"], g["eps"]) == ((0.9, 0.9), 0.1) for g in optimizer.param_groups)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"opt": "adamx"}, "--opt adamx: must be adamw, nadamw, sgd or timm/NAME"),
        ({"opt": "timm/none"}, "--opt timm/none: timm has .*lamb"),
        ({"opt_kwargs": ("fused",)}, "must be key=value"),
    ],
)
def test_wrong_optimizers_are_refused(over, message):
    model = towers.model("native")
    config = OptimizerConfig(**over)
    with pytest.raises(UserError, match=message):
        build_optimizer(model, plan_parameters(model, config), config)


@pytest.mark.parametrize("over", [{"text_layer_decay": 0.0}, {"grad_clip_norm": 0.0}, {"warmup": -1}])
def test_wrong_numbers_are_refused(over):
    with pytest.raises(UserError, match="must be"):
        OptimizerConfig(**over)


def test_wrappers_leave_no_trace_in_clean_names():
    assert clean_name("module.visual._orig_mod.blocks.0._checkpoint_wrapped_module.w") == "visual.blocks.0.w"


def _groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[tuple]:
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    return [
        (
            group["name"],
            group["lr"],
            group["lr_scale"],
            group["weight_decay"],
            [(names[p], tuple(p.shape)) for p in group["params"]],
        )
        for group in optimizer.param_groups
    ]


def _shard(model: nn.Module, shape: tuple[int, ...], offload: bool = False) -> nn.Module:
    names = ("replicate", "shard")[-len(shape) :]
    arguments = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if offload:
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.text.transformer.resblocks:
        fully_shard(block, **arguments)
    fully_shard(model.visual, **arguments)
    fully_shard(model.text, **arguments)
    ignored = {p for p in (model.logit_scale, model.logit_bias) if p is not None}
    return fully_shard(model, ignored_params=ignored, **arguments)


def _groups_under_each_engine() -> tuple[list, list, list]:
    config = OptimizerConfig(image_layer_decay=0.5, wd_exclude=("text.token_embedding.weight",))
    found = []
    for wrap in (lambda m: m, DistributedDataParallel, lambda m: _shard(m, (2,))):
        model = towers.model("native")
        lock(model, LockConfig(lock_text=True, lock_text_unlocked_layers=2))
        plan = plan_parameters(model, config)
        wrapped = wrap(model)
        found.append(_groups(build_optimizer(wrapped, plan, config), wrapped))
    return tuple(found)


def test_groups_are_the_same_before_and_after_wrapping(ranks):
    for plain, ddp, fsdp in ranks(2).run(_groups_under_each_engine):
        assert len(plain) == 9
        assert ddp == plain
        assert fsdp == plain


def _step(model: nn.Module, images: Tensor, texts: Tensor) -> None:
    """Gradients of the mean over the pairs; that of the scale averaged over the ranks, as a step does."""
    out = model(images, texts)
    (
        out.logit_scale * F.cosine_similarity(out.image_features, out.text_features.roll(1, 0))
    ).mean().backward()
    if dist.is_initialized():
        scale = model.logit_scale.grad
        dist.all_reduce(scale)
        scale /= dist.get_world_size()


def _twenty_clipped_steps(shape: tuple[int, ...] | None, offload: bool = False) -> dict[str, list[float]]:
    """Norms before clipping and scales of 20 SGD steps; the batch of 8 pairs is shared out by fours."""
    model = towers.model("native")
    images, texts = towers.inputs("native", samples=8)
    if shape is not None:
        model = _shard(model, shape, offload)
        half = slice(4 * (dist.get_rank() % 2), 4 * (dist.get_rank() % 2) + 4)
        images, texts = images[half], texts[half]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parameters = list(model.parameters())
    trace: dict[str, list[float]] = {"norm": [], "clipped": [], "scale": []}
    for _ in range(20):
        optimizer.zero_grad()
        if shape is None:
            for part in (slice(0, 4), slice(4, 8)):
                _step(model, images[part], texts[part])
            for parameter in parameters:
                parameter.grad /= 2
        else:
            _step(model, images, texts)
        norm = gradient_norm(parameters)
        scale_gradients(parameters, 1 / overshoot(norm, 0.05))
        trace["norm"].append(norm.item())
        trace["clipped"].append(gradient_norm(parameters).item())
        optimizer.step()
        trace["scale"].append(model.logit_scale.item())
    return trace


@cache
def _one_process() -> dict[str, list[float]]:
    return _twenty_clipped_steps(None)


@pytest.mark.parametrize(
    ("shape", "offload"), [((2,), False), ((2,), True), ((2, 2), False)], ids=["fsdp", "offload", "hsdp"]
)
def test_b15_norm_with_an_ignored_scalar_is_that_of_one_process(ranks, shape, offload):
    alone = _one_process()
    assert alone["clipped"] == pytest.approx([0.05] * 20, rel=1e-5)
    traces = ranks(2 * len(shape)).run(_twenty_clipped_steps, shape, offload)
    assert traces[1:] == traces[:1] * (len(traces) - 1)
    assert traces[0]["norm"][0] == pytest.approx(alone["norm"][0], rel=1e-6)
    for key in ("norm", "clipped", "scale"):
        assert traces[0][key] == pytest.approx(alone[key], rel=1e-5), key


def _norms_without_a_tower() -> tuple[float, float, bool]:
    model = _shard(towers.model("timm"), (2,))
    _step(model, *towers.inputs("timm"))
    # A class token of one row leaves the second rank with an empty shard.
    tokens = model.visual.trunk.cls_token.grad
    empty = isinstance(tokens, DTensor) and tokens.to_local().numel() == 0
    whole = [p.grad.full_tensor() for p in model.text.parameters()]
    expected = torch.cat([g.flatten().double() for g in [*whole, model.logit_scale.grad]]).norm()
    for parameter in model.visual.parameters():
        parameter.grad = None
    return gradient_norm(model.parameters()).item(), expected.item(), empty


def test_norm_skips_what_has_no_gradient(ranks):
    (first, expected, first_empty), (second, _, second_empty) = ranks(2).run(_norms_without_a_tower)
    assert (first_empty, second_empty) == (False, True)
    assert first == second == pytest.approx(expected, rel=1e-6)


def test_norm_of_no_gradient_at_all_is_zero():
    norm = gradient_norm([nn.Parameter(torch.ones(2))])
    assert norm.item() == 0.0
    assert norm.dtype == torch.float32


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_norm_shows_a_gradient_that_is_not_finite(bad):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, bad])
    assert not gradient_norm([parameter]).isfinite()
