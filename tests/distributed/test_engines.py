"""One curve: every shipped configuration, shrunk, under every engine, recomputed and compiled or not.

The reference is one process on the whole batch, with nothing wrapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import pytest
import tiny
import torch
import towers
from steps import pixels, training_step, weights
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from shardclip.errors import UserError
from shardclip.models import factory
from shardclip.models.locking import LockConfig
from shardclip.training.checkpoint.state import TrainState, to_tensors
from shardclip.training.distributed import current
from shardclip.training.filling import fingerprints, strangers
from shardclip.training.optimizer import clean_name
from shardclip.training.step import TrainingStep
from shardclip.training.units import find_blocks, select_names
from shardclip.training.units import towers as towers_of

STEPS, SAMPLES = 5, 8


class Mode(NamedTuple):
    """How one run lies over its processes."""

    engine: str
    recompute: bool = False
    compiled: bool = False


@dataclass
class Seen:
    """What a run left to compare."""

    losses: list[float]
    keys: set[str]
    """Of the tensors that its checkpoint holds, random states apart."""
    stray: list[str] = field(default_factory=list)
    """Parameters of repeated blocks that the tower or the root would gather."""
    graphs: int = 0
    """Compiled graphs."""


def hsdp_size(mode: Mode) -> int | None:
    """Half of the processes share a replica."""
    return current().world_size // 2 if mode.engine == "hsdp" else None


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """At a small rate: at a high one it makes large steps of the noise in a gradient that is zero."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.2, fused=True)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """At a rate for the ResNet, whose gradient has a norm of 100."""
    return torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)


def step_of(name: str, mode: Mode, **settings: Any) -> TrainingStep:
    """The step of a shrunk configuration over all ranks of the pool."""
    return training_step(
        towers.shrunk(name),
        mode.engine,
        # AdamW makes large steps of the noise in the ResNet's many gradients near zero.
        sgd if name == "RN50" else adamw,
        # Statistics of the local batch would make another function of the model on each number of ranks.
        batch_norm_over_ranks=True,
        grad_checkpointing=mode.recompute,
        torchcompile=mode.compiled,
        torchcompile_backend="eager",
        **settings,
    )


def train(step: TrainingStep, steps: int = STEPS) -> list[float]:
    """Losses of so many steps on this rank's part of the same global batches."""
    everyone, processes = list(range(SAMPLES)), step.processes
    losses = []
    # Batch 0 puts one of the ResNet's ReLUs within rounding of 0, where the gradient jumps by 0.3 %.
    for seed in range(1, steps + 1):
        parts = tiny.batch(everyone, everyone, SAMPLES, seed=seed).split(processes.world_size)
        losses.append(float(step(parts[processes.rank]).losses["loss"]))
    return losses


def stray_parameters(module: nn.Module) -> list[str]:
    """Parameters inside a tower's repeated blocks whose nearest FSDP module is not a block or part of one."""
    found = []
    for tower_name, tower in towers_of(module):
        for block_name, block in find_blocks(tower):
            inside = [m for m in block.modules() if isinstance(m, FSDPModule)]
            covered = {p for m in inside for p in m.parameters()}
            found += [
                f"{tower_name}.{block_name}.{name}"
                for name, parameter in block.named_parameters()
                if parameter not in covered
            ]
    return found


def run_modes(name: str, modes: list[Mode]) -> dict[Mode, Seen]:
    """Runs on every rank: what each mode's run left."""
    seen = {}
    for mode in modes:
        # Blocks of one class share their compiled code, which holds a limited number of graphs.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # On two processes HSDP replicates: then each of its shards is whole.
        step = step_of(name, mode, fsdp_shard_size=hsdp_size(mode))
        losses = train(step)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        state = TrainState(step.engine.module, step.update.optimizer)
        keys = {key for key in to_tensors(state, step.processes.rank) if not key.startswith("rng.")}
        stray = stray_parameters(step.engine.module) if mode.engine in ("fsdp", "hsdp") else []
        seen[mode] = Seen(losses, keys, stray, graphs)
    return seen


def compare(name: str, found: list[dict[Mode, Seen]], expected: Seen) -> None:
    plain = set(factory.build_meta(towers.shrunk(name)).state_dict())
    assert {key.removeprefix("model.") for key in expected.keys if key.startswith("model.")} == plain
    for rank, seen in enumerate(found):
        for mode, run in seen.items():
            where = (name, rank, mode)
            assert run.losses == pytest.approx(expected.losses, rel=1e-5), where
            assert run.keys == expected.keys, where
            assert run.stray == [], where
            assert (run.graphs > 0) == mode.compiled, where


REFERENCE = Mode("none")
SHARDED = [Mode("ddp"), Mode("fsdp"), Mode("hsdp", recompute=True)]
FURTHER = {
    "ViT-G-14": [Mode("fsdp", recompute=True, compiled=True)],
    # What recompute runs again under DDP's first look at the model must be what ran: BatchNorm has two ways.
    "RN50": [Mode("ddp", recompute=True)],
}
"""The others are compiled and recomputed in the long product."""
FAMILIES = ("ViT-G-14", "convnext_base_w", "roberta-ViT-B-32", "RN50", "coca_ViT-B-32")
"""A native tower, timm's, Hugging Face's, a ResNet and a captioner: the whole product is taken of these."""
PRODUCT = [Mode(*mode) for mode in product(("none", "ddp", "fsdp", "hsdp"), (False, True), (False, True))]


def reference_of(ranks: Any, name: str) -> Seen:
    """One process, nothing wrapped."""
    return ranks(1).run(run_modes, name, [REFERENCE])[0][REFERENCE]


@pytest.mark.parametrize("name", towers.SHIPPED)
def test_every_engine_has_the_curve_and_the_keys_of_one_process(ranks, name: str) -> None:
    modes = SHARDED + FURTHER.get(name, [])
    compare(name, ranks(2).run(run_modes, name, modes), reference_of(ranks, name))


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_and_compile_change_nothing_under_any_engine(ranks, name: str) -> None:
    """The rest of the product, beyond the modes of the test above."""
    expected = reference_of(ranks, name)
    done = [REFERENCE, *SHARDED, *FURTHER.get(name, [])]
    alone = [mode for mode in PRODUCT if mode.engine == "none" and mode not in done]
    shared = [mode for mode in PRODUCT if mode.engine != "none" and mode not in done]
    compare(name, ranks(1).run(run_modes, name, alone), expected)
    compare(name, ranks(2).run(run_modes, name, shared), expected)
    in_pairs = [Mode("hsdp"), Mode("hsdp", recompute=True)]
    compare(name, ranks(4).run(run_modes, name, in_pairs), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(towers.SHIPPED) - set(FAMILIES)))
def test_recompute_and_compile_together_change_nothing_under_any_engine(ranks, name: str) -> None:
    modes = [Mode(engine, recompute=True, compiled=True) for engine in ("ddp", "fsdp", "hsdp")]
    compare(name, ranks(2).run(run_modes, name, modes), reference_of(ranks, name))


def still(name: str) -> list[str]:
    """Trainable tensors that ten steps leave as they were."""
    step = training_step(towers.shrunk(name), "fsdp", adamw)
    before = weights(step)
    train(step, steps=10)
    return [key for key, value in weights(step).items() if torch.equal(value, before[key])]


@pytest.mark.parametrize("name", towers.SHIPPED)
def test_every_trainable_tensor_moves_on_one_sharded_process(ranks, name: str) -> None:
    assert ranks(1).run(still, name) == [[]]


# --- the one door, on shards -----------------------------------------------------------------------------


def features_by_parts(name: str, min_parameters: int | None) -> dict[str, float]:
    """Largest differences to the plain model of what is asked for in parts, before and after a step."""
    step = training_step(towers.shrunk(name), "fsdp", adamw, fsdp_min_params=min_parameters)
    plain = factory.build(towers.shrunk(name), seed=0)
    batch = tiny.batch([0, 1], [0, 1], 2)
    images, module = pixels(batch.images), step.engine.module
    with torch.no_grad():
        whole = plain(images, batch.texts)
        found = module(images).image_features, module(None, batch.texts).text_features, module().logit_scale
    differences = {
        part: (mine - theirs).abs().max().item()
        for part, mine, theirs in zip(("image", "text", "scale"), found, whole, strict=False)
    }
    train(step, steps=1)
    with torch.no_grad():
        trained = module(images).image_features
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        again = module(images).image_features
    differences["stale"] = (trained - again).abs().max().item()
    moved = (trained - whole.image_features).abs().max().item()
    return differences | {"unmoved": float(moved < 1e-5)}


@pytest.mark.parametrize("min_parameters", [None, 20_000], ids=["blocks", "large modules"])
def test_b06_features_and_scale_are_read_from_the_sharded_model_itself(ranks, min_parameters) -> None:
    for found in ranks(2).run(features_by_parts, "ViT-G-14", min_parameters):
        assert max(found.values()) <= 1e-6, found


# --- starting weights and buffers ------------------------------------------------------------------------


def unequal_at_the_start(name: str) -> list[str]:
    """Parameters and buffers, saved or not, that are not those of the model as one process builds it."""
    step, plain = step_of(name, Mode("hsdp"), fsdp_shard_size=1), factory.build(towers.shrunk(name), seed=0)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    found = {**weights(step), **{clean_name(n): b for n, b in step.engine.module.named_buffers()}}
    assert found.keys() == expected.keys()
    return [key for key, value in found.items() if not torch.equal(value, expected[key])]


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("ViT-G-14", "text.attn_mask"),
        ("roberta-ViT-B-32", "position_ids"),
        ("rotary", "visual.trunk.rope."),
        ("RN50", "running_var"),
    ],
)
def test_b19_what_meta_left_out_is_as_one_process_builds_it(ranks, name: str, buffer: str) -> None:
    assert any(buffer in key for key, _ in factory.build(towers.shrunk(name)).named_buffers())
    assert ranks(2).run(unequal_at_the_start, name) == [[], []]


def after_one_flaw(engine: str) -> list[list[str]]:
    """What is found to differ from what was sent: at the start, and when rank 1 alone holds other bits."""
    step, plain = (
        step_of("roberta-ViT-B-32", Mode(engine)),
        factory.build(towers.shrunk("roberta-ViT-B-32"), seed=0),
    )
    sent, module = fingerprints(plain), step.engine.module
    found = [strangers(module, sent, step.processes)]
    if step.processes.rank == 1:
        buffers = dict(module.named_buffers())
        next(b for name, b in buffers.items() if name.endswith("position_ids")).view(-1)[3] += 1
    return [*found, [clean_name(name) for name in strangers(module, sent, step.processes)]]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_b19_ranks_compare_what_they_hold_before_the_first_step(ranks, engine: str) -> None:
    for at_start, flawed in ranks(2).run(after_one_flaw, engine):
        assert at_start == []
        assert [name.rpartition(".")[2] for name in flawed] == ["position_ids"]


# --- what is gathered, when ------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts collectives by kind, and the bytes that go into reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.reduced_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.gathers += "allgather" in func._opname
            self.reduced_bytes += args[1].nbytes if "_reduce_scatter_base" in func._opname else 0
        return func(*args, **(kwargs or {}))


def gathers_of(settings: dict[str, Any]) -> dict[str, Any]:
    """All-gathers of a step; how many had been asked for within the first block, forward and backward."""
    step = training_step(tiny.spec(layers=4), "fsdp", adamw, **settings)
    losses = train(step, steps=2)
    blocks = step.engine.module.visual.transformer.resblocks
    seen: dict[str, int] = {}

    def note(when: str) -> None:
        seen.setdefault(when, counted.gathers)

    with Collectives() as counted:
        blocks[0].mlp.register_forward_hook(lambda *_: note("forward"))
        blocks[3].mlp.register_full_backward_hook(lambda *_: note("backward"))
        losses += train(step, steps=1)
    return {"gathers": counted.gathers, "losses": losses, **seen}


def test_prefetch_asks_earlier_and_kept_units_are_not_asked_for_again(ranks) -> None:
    default = ranks(2).run(gathers_of, {})[0]
    ahead = ranks(2).run(gathers_of, {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 3})[0]
    assert ahead["losses"] == default["losses"]
    assert ahead["gathers"] == default["gathers"]
    assert ahead["forward"] == default["forward"] + 2
    # FSDP2 itself asks for one ahead in backward.
    assert ahead["backward"] == default["backward"] + 2
    kept = ranks(2).run(gathers_of, {"fsdp_keep_gathered": ("visual.transformer.resblocks.[01]", "text")})[0]
    assert kept["losses"] == default["losses"]
    assert kept["gathers"] == default["gathers"] - 3


def test_a_unit_to_keep_that_is_not_there_is_named() -> None:
    units = ["visual.transformer.resblocks.0", "visual"]
    with pytest.raises(UserError, match=r"--fsdp-keep-gathered .*resblocks\.9: .*nearest: .*resblocks\.0"):
        select_names(tiny.build(), "--fsdp-keep-gathered", units, ["visual.transformer.resblocks.9"])


def reduced(locked: bool) -> tuple[int, int]:
    """Bytes of gradients that a step reduces, and those of what trains in the towers, rows padded to even."""
    patterns = ("*.attn.*", "visual.conv1.weight") if locked else ()
    step = training_step("clip", "fsdp", sgd, locked=LockConfig(lock_patterns=patterns))
    train(step, steps=1)
    with Collectives() as counted:
        train(step, steps=1)
    trains = [p for p in step.engine.module.parameters() if p.requires_grad and p.ndim]
    return counted.reduced_bytes, sum(4 * p.numel() // len(p) * (len(p) + len(p) % 2) for p in trains)


def test_b13_a_unit_that_is_partly_locked_reduces_only_what_trains(ranks) -> None:
    for sent, trains in ranks(2).run(reduced, True):
        assert sent == trains
    assert ranks(2).run(reduced, False)[0][0] > sent
