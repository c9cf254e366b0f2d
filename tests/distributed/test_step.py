"""What a step does besides its gradient: skips, clamps, replays, counts, and leaves alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import pytest
import tiny
import torch
import torch.nn.functional as F
from steps import gradients, training_step, weights
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from shardclip.models import factory
from shardclip.models.locking import LockConfig
from shardclip.training.distributed import current
from shardclip.training.loss_scale import LossScale
from shardclip.training.objective import Objective, ObjectiveConfig
from shardclip.training.optimizer import clean_name
from shardclip.training.parallel import ParallelConfig, parallelize
from shardclip.training.step import TrainingStep, _Pass
from shardclip.training.update import Update

ENGINES = ("ddp", "fsdp", "hsdp")
PAIRED = list(range(4))


def own_batch(step: TrainingStep, samples: int = 4, seed: int = 0) -> Any:
    everyone = list(range(samples))
    return tiny.batch(everyone, everyone, samples, seed=seed, first=samples * step.processes.rank)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.2)


# --- the scale ------------------------------------------------------------------------------------------


def clamped_scales(engine: str) -> list[float]:
    step = training_step("clip", engine, partial(torch.optim.SGD, lr=1e-9))
    step.engine.module(clamp_scale=(math.log(1000.0), math.log(1000.0)))
    read = []
    with torch.no_grad():
        step.engine.module(*_inputs(step))
        step.engine.module(clamp_scale=(0.0, math.log(100.0)))
    read.append(weights(step)["logit_scale"].exp().item())
    step.engine.module(clamp_scale=(math.log(1000.0), math.log(1000.0)))
    step(own_batch(step))
    read.append(weights(step)["logit_scale"].exp().item())
    return read


def _inputs(step: TrainingStep) -> tuple[Tensor, Tensor]:
    batch = own_batch(step)
    return step.pixels(batch.images), batch.texts


@pytest.mark.parametrize("engine", ENGINES)
def test_b07_the_clamp_holds_after_an_evaluation_and_after_a_step(ranks, engine: str) -> None:
    for read in ranks(2).run(clamped_scales, engine):
        assert read == pytest.approx([100.0, 100.0], rel=1e-6)


def scales_of_a_run(engine: str) -> list[float]:
    step = training_step("clip", engine, partial(torch.optim.SGD, lr=50.0))
    return [float(step(own_batch(step)).logit_scale) for _ in range(20)]


def test_b30_the_scale_starts_at_its_value_and_stays_within_its_bounds(ranks) -> None:
    assert tiny.build().logit_scale.exp().item() == pytest.approx(1 / 0.07)
    assert tiny.build("siglip").logit_bias.item() == -10.0
    for read in ranks(2).run(scales_of_a_run, "fsdp"):
        assert all(1.0 <= scale <= 100.0 * (1 + 1e-6) for scale in read)
        assert max(read) > 50 or min(read) < 5, "the rate was meant to push the scale against a bound"


# --- precision ------------------------------------------------------------------------------------------


def dtypes_under(engine: str, precision: str) -> dict[str, set[str]]:
    step = training_step("siglip", engine, adamw, precision=precision)
    out = step.engine.module(*_inputs(step))
    result = step(own_batch(step))
    state = [value for entry in step.update.optimizer.state.values() for value in entry.values()]
    return {
        "weights": {str(p.dtype) for p in step.engine.module.parameters()},
        "moments": {str(value.dtype) for value in state},
        "outputs": {str(t.dtype) for t in out if t is not None},
        "losses": {str(loss.dtype) for loss in result.losses.values()},
        "scale": {repr(round(float(out.logit_scale.detach()), 5))},
    }


@pytest.mark.parametrize(
    ("engine", "precision"), [("fsdp", "amp_bf16"), ("ddp", "amp_bf16"), ("fsdp", "fp16")]
)
def test_b21_masters_moments_scale_and_loss_are_fp32(ranks, engine: str, precision: str) -> None:
    for found in ranks(2).run(dtypes_under, engine, precision):
        scale = found.pop("scale")
        assert all(dtypes == {"torch.float32"} for dtypes in found.values()), found
        # In bf16 the scale itself would be 9.9375 or 10.0625.
        assert scale == {"10.0"}


def moved(precision: str) -> list[str]:
    step = training_step("clip", "fsdp", partial(torch.optim.AdamW, lr=5e-4), precision=precision)
    before = weights(step)
    for seed in range(10):
        step(own_batch(step, seed=seed))
    return [name for name, value in weights(step).items() if torch.equal(value, before[name])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_b21_every_trainable_tensor_moves_in_bf16(ranks, world_size: int) -> None:
    for still in ranks(world_size).run(moved, "amp_bf16"):
        assert still == []


def poison_rank_1(step: TrainingStep) -> None:
    """Put inf into one shard of rank 1's gradient, after its reduction."""
    original = step._drop_unused

    def poisoned(totals: Any) -> list[torch.nn.Parameter]:
        parameters = original(totals)
        if step.processes.rank == 1:
            local = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
            next(shard for shard in local if shard.numel()).view(-1)[0] = math.inf
        return parameters

    step._drop_unused = poisoned  # type: ignore[method-assign]


def overflow(offload: bool) -> dict[str, Any]:
    step = training_step("clip", "fsdp", sgd, fsdp_cpu_offload=offload)
    step.update.loss_scale = LossScale(step.processes.device, 1024.0)
    step(own_batch(step))
    before, original = weights(step), step._drop_unused
    poison_rank_1(step)
    result = step(own_batch(step))
    step._drop_unused = original  # type: ignore[method-assign]
    same = all(torch.equal(value, before[name]) for name, value in weights(step).items())
    scale = float(step.update.loss_scale.value)
    step(own_batch(step))
    changed = any(not torch.equal(value, before[name]) for name, value in weights(step).items())
    return {"skipped": result.skipped, "same": same, "scale": scale, "changed": changed}


@pytest.mark.parametrize("offload", [False, True])
def test_b17_b32_one_overflow_decision_for_all_ranks(ranks, offload: bool) -> None:
    expected = {"skipped": True, "same": True, "scale": 512.0, "changed": True}
    assert ranks(2).run(overflow, offload) == [expected, expected]


def step_with_a_poisoned_picture(engine: str) -> dict[str, Any]:
    step = training_step("clip", engine, adamw)
    step(own_batch(step))
    before = weights(step)
    healthy = step.pixels

    def poisoned(images: Tensor) -> Tensor:
        values = healthy(images)
        if step.processes.rank == 1 and len(values) > 2:
            values[2] = math.nan
        return values

    step.pixels = poisoned
    result = step(own_batch(step))
    after = weights(step)
    return {
        "skipped": result.skipped,
        "culprits": step.culprits(own_batch(step)),
        "same": all(torch.equal(after[name], before[name]) for name in after),
    }


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_b32_a_bad_picture_skips_the_step_everywhere_and_is_named(ranks, engine: str) -> None:
    first, second = ranks(2).run(step_with_a_poisoned_picture, engine)
    assert first == {"skipped": True, "culprits": [], "same": True}
    assert second == {"skipped": True, "culprits": ["sample-6"], "same": True}


def fp16_gradients(engine: str) -> list[float]:
    """fp32 gradients with and without a loss scale."""
    found = []
    for scale in (1.0, 4096.0):
        step = training_step("clip", engine)
        step.update.loss_scale = None if scale == 1.0 else LossScale(step.processes.device, scale)
        step.update.max_norm = 0.5
        result = step(own_batch(step))
        found.append((gradients(step), float(result.gradient_norm)))
    (plain, norm), (scaled, scaled_norm) = found
    worst = max(((plain[n] - scaled[n]).norm() / plain[n].norm().clamp(min=1e-6)).item() for n in plain)
    return [worst, abs(norm - scaled_norm) / norm]


def test_the_loss_scale_changes_neither_gradient_nor_norm_nor_clipping(ranks) -> None:
    for worst, norm in ranks(2).run(fp16_gradients, "fsdp"):
        assert worst < 1e-5
        assert norm < 1e-6


# --- accumulation ---------------------------------------------------------------------------------------


def replayed(engine: str) -> dict[str, Any]:
    torch.manual_seed(current().rank)
    step = training_step("clip", engine, vision={"patch_dropout": 0.5, "patch_size": 4})
    step.engine.module.train()
    pair = [_Pass(step, part) for part in own_batch(step).split(2)]
    cached = [p.preview() for p in pair]
    again = []
    for index, current_pass in enumerate(pair):
        with step.engine.synchronising(index == 1):
            again.append(current_pass.encode(again=True))
    with torch.no_grad():
        other = _Pass(step, own_batch(step).split(2)[0]).encode()
    return {
        "equal": all(
            torch.equal(a.image_features, b.image_features) and torch.equal(a.text_features, b.text_features)
            for a, b in zip(cached, again, strict=True)
        ),
        "random": not torch.equal(other.image_features, cached[0].image_features),
    }


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_b29_the_second_forward_repeats_the_random_numbers_of_the_first(ranks, engine: str) -> None:
    assert ranks(2).run(replayed, engine) == [{"equal": True, "random": True}] * 2


def batch_norm_statistics(recompute: bool) -> dict[str, Any]:
    step = training_step("resnet", "none", sgd, grad_checkpointing=recompute)
    step.accumulation = 2
    batch = own_batch(step, 8)
    reference = tiny.build("resnet").train()
    for part in batch.split(2):
        with torch.no_grad():
            reference(step.pixels(part.images))
    step(batch)
    expected = dict(reference.named_buffers())
    return {name: torch.equal(buffer, expected[name]) for name, buffer in step.engine.module.named_buffers()}


@pytest.mark.parametrize("recompute", [False, True])
def test_b29_batch_norm_statistics_are_updated_once(ranks, recompute: bool) -> None:
    (equal,) = ranks(1).run(batch_norm_statistics, recompute)
    assert len(equal) > 3
    assert all(equal.values()), [name for name, same in equal.items() if not same]


def blank_rows_and_statistics() -> bool:
    """Rank 1 has no picture: its running statistics must stay what they were."""
    step = training_step("resnet", "fsdp", sgd)
    before = {name: buffer.clone() for name, buffer in step.engine.module.named_buffers()}
    rank = step.processes.rank
    step(tiny.batch([] if rank else PAIRED, PAIRED, 4, first=4 * rank))
    return all(torch.equal(buffer, before[name]) for name, buffer in step.engine.module.named_buffers())


def test_a_blank_picture_does_not_count_in_batch_norm(ranks) -> None:
    assert ranks(2).run(blank_rows_and_statistics) == [False, True]


def collectives(accumulation: int, offload: bool) -> dict[str, int]:
    step = training_step("clip", "fsdp", sgd, fsdp_cpu_offload=offload)
    step.accumulation = accumulation
    step(own_batch(step))
    with CommDebugMode() as counter:
        step(own_batch(step))
    counts = {str(name).split(".")[-1]: n for name, n in counter.get_comm_counts().items()}
    return {name: n for name, n in counts.items() if "reduce_scatter" in name}


@pytest.mark.parametrize("offload", [False, True])
def test_b18_gradients_are_reduced_once_whatever_the_accumulation(ranks, offload: bool) -> None:
    once = ranks(2).run(collectives, 1, offload)
    four = ranks(2).run(collectives, 4, offload)
    # Two blocks and the rest of each of two towers: six groups.
    assert [sum(counts.values()) for counts in once] == [6, 6]
    assert once == four


# --- recompute, locked and unused towers ----------------------------------------------------------------


def recompute_error(kind: str, locked: bool, caption_weight: float) -> float:
    objective = ObjectiveConfig(coca_caption_loss_weight=caption_weight)
    config = LockConfig(lock_image=True) if locked else None
    found = []
    for recompute in (False, True):
        step = training_step(kind, "ddp", locked=config, objective=objective, grad_checkpointing=recompute)
        step(own_batch(step))
        found.append(gradients(step))
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    return max((plain[n] - recomputed[n]).abs().max().item() for n in plain)


@pytest.mark.parametrize(
    ("kind", "locked", "caption_weight"),
    [("clip", False, 2.0), ("clip", True, 2.0), ("coca", False, 2.0), ("coca", False, 0.0)],
)
def test_b26_recompute_under_ddp_gives_the_same_gradient(ranks, kind, locked, caption_weight) -> None:
    for error in ranks(2).run(recompute_error, kind, locked, caption_weight):
        assert error <= 1e-6


def steps_without_pairs(engine: str) -> dict[str, Any]:
    step = training_step("clip", engine, adamw)
    step(own_batch(step))
    before = weights(step)
    counts = [float(entry["step"]) for entry in step.update.optimizer.state.values()]
    rank = step.processes.rank
    for _ in range(3):
        result = step(tiny.batch([], PAIRED, 4, first=4 * rank))
    after = weights(step)
    return {
        "same": all(torch.equal(after[name], before[name]) for name in after),
        "counts": counts == [float(entry["step"]) for entry in step.update.optimizer.state.values()],
        "loss": float(result.losses["loss"]),
        "skipped": result.skipped,
    }


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_b01_steps_in_which_nobody_has_an_image_change_nothing(ranks, engine: str) -> None:
    expected = {"same": True, "counts": True, "loss": 0.0, "skipped": False}
    assert ranks(2).run(steps_without_pairs, engine) == [expected] * 2


def locked_run(engine: str) -> dict[str, Any]:
    step = training_step(
        "clip", engine, adamw, locked=LockConfig(lock_image=True, lock_image_unlocked_groups=1)
    )
    before = weights(step)
    frozen = {clean_name(n) for n, p in step.engine.module.named_parameters() if not p.requires_grad}
    losses = [float(step(own_batch(step, seed=seed)).losses["loss"]) for seed in range(5)]
    after = weights(step)
    return {
        "frozen": sorted(frozen),
        "drift": [name for name in frozen if not torch.equal(after[name], before[name])],
        "still": [n for n in after if n not in frozen and torch.equal(after[n], before[n])],
        "gradients": sum(p.grad is not None for p in step.engine.module.parameters() if not p.requires_grad),
        "states": len(step.update.optimizer.state) == len(after) - len(frozen),
        "losses": losses,
    }


def test_b13_a_locked_tower_costs_and_moves_nothing(ranks) -> None:
    by_engine = {engine: ranks(2).run(locked_run, engine)[0] for engine in ("ddp", "fsdp")}
    for found in by_engine.values():
        assert found["frozen"]
        assert all(name.startswith("visual.") for name in found["frozen"])
        assert (found["drift"], found["still"], found["gradients"], found["states"]) == ([], [], 0, True)
    assert by_engine["ddp"]["losses"] == pytest.approx(by_engine["fsdp"]["losses"], rel=1e-6)


# --- engines agree --------------------------------------------------------------------------------------


class Curves(NamedTuple):
    """What a run logs, step by step."""

    losses: list[float]
    norms: list[float]
    scales: list[float]


def twenty_steps(engine: str, optimizer: str, precision: str = "fp32") -> tuple[Curves, dict[str, Tensor]]:
    step = training_step("clip", engine, sgd if optimizer == "sgd" else adamw, precision=precision)
    step.update.max_norm = 1.0
    world_size, rank = step.processes.world_size, step.processes.rank
    seen = []
    for seed in range(20):
        everyone = list(range(8))
        whole = tiny.batch(everyone, everyone, 8, seed=seed)
        result = step(whole.split(world_size)[rank])
        seen.append((float(result.losses["loss"]), float(result.gradient_norm), float(result.logit_scale)))
    return Curves(*map(list, zip(*seen, strict=True))), weights(step)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_b63_twenty_steps_agree_under_every_engine(ranks, optimizer: str) -> None:
    curves, alone = ranks(1).run(twenty_steps, "none", optimizer)[0]
    for engine in ENGINES:
        found, values = ranks(2).run(twenty_steps, engine, optimizer)[0]
        assert found.losses == pytest.approx(curves.losses, rel=1e-5)
        assert found.norms == pytest.approx(curves.norms, rel=1e-4)
        assert found.scales == pytest.approx(curves.scales, rel=1e-6)
        for name, value in values.items():
            value, expected = _without_key_bias(name, value), _without_key_bias(name, alone[name])
            assert torch.allclose(value, expected, rtol=1e-4, atol=2e-5), name


def test_b63_in_bf16_ddp_and_fsdp_are_as_near_to_fp32_as_bf16_allows(ranks) -> None:
    exact = ranks(1).run(twenty_steps, "none", "sgd")[0][0]
    for engine in ("ddp", "fsdp"):
        found = ranks(2).run(twenty_steps, engine, "sgd", "amp_bf16")[0][0]
        # A bf16 number is within 2 ** -9 of what it stands for; the logits are those errors times the scale.
        assert found.losses == pytest.approx(exact.losses, rel=0.02)
        assert found.scales == pytest.approx(exact.scales, rel=1e-3)


def _without_key_bias(name: str, value: Tensor) -> Tensor:
    """The key's third of `in_proj_bias` has no true gradient: AdamW makes steps of rounding noise."""
    if not name.endswith("in_proj_bias"):
        return value
    third = len(value) // 3
    return torch.cat([value[:third], value[2 * third :]])


# --- captions -------------------------------------------------------------------------------------------


def overfit(contrastive_weight: float, accumulation: int) -> tuple[float, float]:
    """Share of caption tokens that 150 steps on four pairs have taught, and the last loss's caption part."""
    objective = ObjectiveConfig(coca_contrastive_loss_weight=contrastive_weight, coca_caption_loss_weight=1.0)
    step = training_step("coca", "none", partial(torch.optim.AdamW, lr=2e-3), objective=objective)
    step.accumulation = accumulation
    batch = own_batch(step)
    for _ in range(150):
        result = step(batch)
    rows = torch.arange(4)
    with torch.no_grad():
        out = step.engine.module(step.pixels(batch.images), batch.texts, caption_pairs=(rows, rows))
    labels = batch.texts[:, 1:]
    right = (out.caption_logits.argmax(-1) == labels)[labels != 0]
    return right.float().mean().item(), float(result.losses["contrastive_loss"])


@pytest.mark.long
@pytest.mark.parametrize(("contrastive_weight", "accumulation"), [(0.0, 1), (1.0, 2)])
def test_b61_a_captioning_model_learns_four_captions_by_heart(
    ranks, contrastive_weight, accumulation
) -> None:
    ((right, contrastive),) = ranks(1).run(overfit, contrastive_weight, accumulation)
    assert right == 1.0
    assert (contrastive == 0.0) == (contrastive_weight == 0.0)


# --- BatchNorm over ranks -------------------------------------------------------------------------------


def synchronised_batch_norm(engine: str, precision: str) -> tuple[float, float, float]:
    """Largest relative errors of gradients and of running statistics against one process, and the loss's."""
    step = training_step("resnet", engine, batch_norm_over_ranks=True, precision=precision)
    rank, everyone = step.processes.rank, list(range(4))
    own = tiny.batch(everyone if rank == 0 else [], everyone, 4, first=4 * rank)
    result = step(own)
    model = tiny.build("resnet").train()
    images, texts = tiny.batch(everyone, everyone, 4), tiny.batch([], list(range(8)), 8)
    out = model(step.pixels(images.images), texts.texts)
    logits = out.logit_scale * out.image_features @ out.text_features.T
    target = torch.arange(4)
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T[:4], target)) / 2
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    found = gradients(step)
    worst = max(((found[n] - g).norm() / max(g.norm(), 1e-3 * norm)).item() for n, g in expected.items())
    buffers = dict(step.engine.module.named_buffers())
    statistics = max(
        (buffers[_wrapped(name, buffers)] - value).abs().max().item()
        for name, value in model.named_buffers()
        if "running" in name
    )
    return worst, statistics, abs(result.losses["loss"].item() - loss.item())


def _wrapped(name: str, names: dict[str, Tensor]) -> str:
    return next(known for known in names if clean_name(known) == name)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_synchronised_batch_norm_has_one_gradient_though_a_rank_has_no_picture(ranks, engine: str) -> None:
    for gradient, statistics, loss in ranks(2).run(synchronised_batch_norm, engine, "fp32"):
        assert gradient <= 1e-4
        assert statistics <= 1e-6
        assert loss <= 1e-5


def test_batch_norm_computes_in_fp32_under_a_bf16_policy(ranks) -> None:
    for _, statistics, loss in ranks(2).run(synchronised_batch_norm, "fsdp", "amp_bf16"):
        assert statistics <= 0.02
        assert loss <= 0.1


# --- parameters that nothing depends on -----------------------------------------------------------------


def with_an_idle_layer(engine: str) -> dict[str, Any]:
    processes, spec = current(), tiny.spec()
    model, source = factory.build_meta(spec), tiny.build()
    with torch.device("meta"):
        model.text.pooler = torch.nn.Linear(4, 4)
    source.text.pooler = torch.nn.Linear(4, 4)
    config = ParallelConfig(distributed_engine=engine, precision="fp32")
    laid = parallelize(
        model,
        config,
        processes,
        source=source if processes.is_primary else None,
        blank_text=tiny.blank_text(),
    )
    step = TrainingStep(
        laid,
        Objective(ObjectiveConfig(), spec),
        Update(adamw(list(laid.module.parameters())), processes.device),
        processes,
        pixels=lambda images: images.float() / 255 - 0.5,
        blank_text=tiny.blank_text(),
        blank_image=torch.zeros(1, 3, 32, 32, dtype=torch.uint8),
    )
    before = weights(step)
    for seed in range(3):
        step(own_batch(step, seed=seed))
    return {"still": [name for name, value in weights(step).items() if torch.equal(value, before[name])]}


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_layer_that_nothing_depends_on_neither_hangs_nor_decays(ranks, engine: str) -> None:
    expected = {"still": ["text.pooler.weight", "text.pooler.bias"]}
    assert ranks(2).run(with_an_idle_layer, engine) == [expected] * 2
