"""Which modules become units: by class, by size, and by default, on every kind of tower."""

from collections import Counter

import pytest
import tiny
import torch
from torch import nn

from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.factory import ModelConfig
from shardclip.training.parallel import ParallelConfig
from shardclip.training.units import find_blocks, find_units, runs_in_order, select, table


def classes(name: str) -> Counter[tuple[str, str]]:
    model = factory.build_meta(factory.resolve(ModelConfig(model=name)))
    return Counter((unit.name.split(".")[0], unit.class_name) for unit in find_units(model))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ViT-B-32", {("visual", "ResidualAttentionBlock"): 12, ("text", "ResidualAttentionBlock"): 12}),
        (
            "coca_ViT-B-32",
            {
                ("visual", "ResidualAttentionBlock"): 12,
                ("text", "ResidualAttentionBlock"): 12,
                ("text_decoder", "ResidualAttentionBlock"): 24,
            },
        ),
        ("ViT-B-16-SigLIP", {("visual", "Block"): 12, ("text", "ResidualAttentionBlock"): 12}),
        ("RN50", {("visual", "Bottleneck"): 16, ("text", "ResidualAttentionBlock"): 12}),
        ("convnext_base_w", {("visual", "ConvNeXtBlock"): 36, ("text", "ResidualAttentionBlock"): 12}),
    ],
)
def test_blocks_of_both_towers_are_found(name: str, expected: dict[tuple[str, str], int]) -> None:
    assert classes(name) == expected


@pytest.mark.parametrize(
    ("architecture", "class_name", "count"),
    [("BertModel", "BertLayer", 3), ("RobertaModel", "RobertaLayer", 3), ("T5EncoderModel", "T5Block", 3)],
)
def test_blocks_of_hugging_face_encoders_are_found(architecture: str, class_name: str, count: int) -> None:
    import transformers

    cls = getattr(transformers, architecture)
    sizes = (
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 3}
        if architecture.startswith("T5")
        else {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}
    )
    encoder = cls(cls.config_class(vocab_size=99, **sizes))
    found = [type(module).__name__ for _, module in find_blocks(encoder)]
    assert found == [class_name] * count


class Odd(nn.Module):
    """A block of nobody's library."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Odd(), Odd()) for _ in range(2))
        self.head = nn.Linear(4, 4)


def test_unknown_blocks_are_found_by_structure() -> None:
    names = [name for name, _ in find_blocks(Tower())]
    assert names == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_patterns_are_class_names_or_regular_expressions() -> None:
    model = tiny.build("timm")
    assert {unit.class_name for unit in find_units(model, ["Block", "Residual.*"])} == {
        "Block",
        "ResidualAttentionBlock",
    }
    attention = select(model, "--fsdp-layers-to-grad-checkpoint", [".*Attention"])
    assert attention
    assert all(name.endswith("attn") for name in attention)


def test_a_pattern_that_matches_nothing_lists_the_classes() -> None:
    with pytest.raises(UserError, match=r"ResidualAttentionBlok: .*nearest: ResidualAttentionBlock") as error:
        find_units(tiny.build(), ["ResidualAttentionBlok"])
    assert "ResidualAttentionBlock (x4)" in str(error.value)


def test_a_tower_without_a_unit_is_an_error() -> None:
    with pytest.raises(UserError, match="no module of the tower `text` matches") as error:
        find_units(tiny.build("timm"), ["Block"])
    assert "ResidualAttentionBlock (x2)" in str(error.value)


def test_units_by_size_are_the_innermost_that_are_large_enough() -> None:
    model = tiny.build()
    block = sum(p.numel() for p in model.visual.transformer.resblocks[0].parameters())
    units = find_units(model, min_parameters=block // 2)
    assert all(unit.parameters >= block // 2 for unit in units)
    assert {unit.class_name for unit in units} >= {"Sequential"}
    with pytest.raises(UserError, match="--fsdp-min-params"):
        find_units(model, min_parameters=10**9)


def test_the_table_accounts_for_every_parameter_of_the_towers() -> None:
    model = tiny.build("coca")
    units = find_units(model)
    lines = table(units, model).splitlines()
    total = sum(int(line.split()[-3]) * int(line.split()[-2].replace(",", "")) for line in lines[1:])
    assert total == sum(p.numel() for n, p in model.named_parameters() if "logit_" not in n)


def test_recompute_of_every_second_block_leaves_names_and_results_alone() -> None:
    from shardclip.training.distributed import current
    from shardclip.training.parallel import parallelize

    torch.manual_seed(0)
    images, texts = torch.randn(2, 3, 32, 32), tiny.batch([], [0, 1], 2).texts
    outputs = []
    for config in (
        ParallelConfig(precision="fp32"),
        ParallelConfig(precision="fp32", grad_checkpointing=True, grad_checkpointing_every=2),
    ):
        engine = parallelize(
            factory.build_meta(tiny.spec()),
            config,
            current(),
            source=tiny.build(),
            blank_text=tiny.blank_text(),
        )
        out = engine.module(images, texts)
        (out.image_features[:, 0].sum() + out.text_features[:, 0].sum()).backward()
        outputs.append({name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None})
    plain, recomputed = outputs
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_units_of_one_list_run_in_order_and_others_are_left_apart() -> None:
    model = tiny.build("coca")
    lists = runs_in_order(model, find_units(model))
    parents = [{name.rpartition(".")[0] for name in names} for names in lists]
    assert sorted(len(names) for names in lists) == [2, 2, 2, 2]
    assert all(len(found) == 1 for found in parents)
    # Attention and feed-forward of a block are no list: nothing says which of them runs first.
    inside = find_units(model, ["MultiheadAttention"])
    assert runs_in_order(model, inside) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_forward_prefetch": -1}, "--fsdp-forward-prefetch -1: must be 0 or more"),
        ({"fsdp_backward_prefetch": 0}, "--fsdp-backward-prefetch 0: must be 1 or more"),
        ({"grad_checkpointing_every": 0}, "--grad-checkpointing-every 0: must be 1 or more"),
    ],
)
def test_counts_out_of_range_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ParallelConfig(**settings)
