"""Evaluation under real processes: each sample once, one figure however it is read, no trace left."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from evaluation import small
from launched import HANG_SECONDS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardclip.errors import UserError
from shardclip.training.data.config import DataConfig
from shardclip.training.data.image_input import normalise
from shardclip.training.distributed import current
from shardclip.training.evaluation.config import EvaluationConfig
from shardclip.training.evaluation.lockstep import lockstep
from shardclip.training.evaluation.run import evaluate
from shardclip.training.evaluation.undisturbed import undisturbed
from shardclip.training.evaluation.zero_shot import classifier

Figures = dict[str, float]


@pytest.fixture(scope="module", params=["distinct", "repeated"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    small.write_pairs(folder / "pairs", repeated=request.param == "repeated")
    small.write_labelled(folder / "labelled")
    return folder


def figures(module: nn.Module, folder: Path, batch_size: int, chunk_size: int = 4096) -> Figures:
    results = evaluate(
        module,
        EvaluationConfig(
            zeroshot_data=str(folder / "labelled"),
            val_batch_size=batch_size,
            val_retrieval_chunk_size=chunk_size,
        ),
        DataConfig(val_data=str(folder / "pairs"), workers=0),
        small.IMAGE_INPUT,
        small.tokenize,
        processes=current(),
    )
    found: Figures = {}
    for result in results:
        found |= {f"{result.task}/{name}": value for name, value in result.metrics.items()}
        found[f"{result.task}/samples"] = result.samples
    return found


def figures_of_all(kinds: list[str], folder: Path) -> list[tuple[str, int, Figures]]:
    found = []
    for kind in kinds:
        module = small.engine(kind).module
        for batch_size in (4, 8):
            found.append((kind, batch_size, figures(module, folder, batch_size, chunk_size=batch_size)))
    return found


def test_b55_b06_b02_the_same_figures_on_any_ranks_batches_and_engines(ranks: Any, data: Path):
    # A collective of which one rank has more would hang here, or pair up with another's and show.
    reference = figures(small.model(), data, batch_size=21)
    assert reference["zeroshot_retrieval/samples"] == 21
    assert reference["zeroshot_classification/samples"] == 13
    for world_size, kinds in ((1, ["none", "fsdp"]), (2, ["ddp", "fsdp"]), (4, ["ddp", "fsdp"])):
        answers = ranks(world_size).run(figures_of_all, kinds, data)
        for answer in answers:
            for kind, batch_size, found in answer:
                assert found == pytest.approx(reference, abs=1e-6), (world_size, kind, batch_size)


def test_as_open_clip_on_one_process(tmp_path: Path):
    from open_clip import build_zero_shot_classifier
    from open_clip_train.train import get_clip_metrics

    small.write_pairs(tmp_path / "pairs", repeated=False)
    labels = torch.tensor(small.write_labelled(tmp_path / "labelled"))
    plain = small.model().eval()
    ours = figures(plain, tmp_path, batch_size=4)

    def features(numbers: range) -> Tensor:
        pictures = torch.stack([torch.from_numpy(small.picture(n)).permute(2, 0, 1) for n in numbers])
        with torch.no_grad():
            return plain(image=normalise(pictures, small.IMAGE_INPUT)).image_features

    captions = [f"{'abcdefghijklmnopqrstu'[n]}{n * 37 % 21} thing" for n in range(21)]
    with torch.no_grad():
        texts = plain(text=small.tokenize(captions)).text_features
    retrieved = get_clip_metrics(features(range(21)), texts, torch.tensor(14.0))
    assert {name: ours[f"zeroshot_retrieval/{name}"] for name in retrieved} == pytest.approx(
        retrieved, abs=1e-6
    )

    templates = [template.replace("{c}", "{}") for template in small.TEMPLATES]
    weights = build_zero_shot_classifier(
        small.AsOpenClip(plain), small.tokenize, small.CLASSES, templates, num_classes_per_batch=2
    )
    mine = classifier(
        plain, small.tokenize, small.CLASSES, small.TEMPLATES, processes=current(), batch_size=4
    )
    assert torch.allclose(mine, weights, atol=1e-6)
    # The fifth name is the first again; without it nothing is tied.
    right = (features(range(100, 113)) @ weights[:, :4]).argmax(dim=1) == labels
    assert ours["zeroshot_classification/acc1"] == pytest.approx(float(right.double().mean()), abs=1e-9)


def train(kind: str, folder: Path, every: int | None) -> tuple[list[float], dict[str, Tensor]]:
    """Twenty steps, with an evaluation after every so many; the losses and the weights."""
    module = small.engine(kind).module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.manual_seed(current().rank)
    losses = []
    for step in range(20):
        module.train()
        pixels, texts = torch.randn(4, 3, small.SIZE, small.SIZE), torch.randint(1, 60, (4, 12))
        encoded = module(image=pixels, text=texts)
        logits = encoded.logit_scale * encoded.image_features @ encoded.text_features.T
        loss = nn.functional.cross_entropy(logits, torch.arange(4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if every is not None and step % every == every - 1:
            figures(module, folder, batch_size=4)
    whole = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in module.state_dict().items()
    }
    return losses, whole


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_b63_evaluation_does_not_change_the_next_step(ranks: Any, tmp_path: Path, kind: str):
    small.write_pairs(tmp_path / "pairs", repeated=False)
    small.write_labelled(tmp_path / "labelled")
    without = ranks(2).run(train, kind, tmp_path, None)
    with_evaluation = ranks(2).run(train, kind, tmp_path, 5)
    for (losses, weights), (other_losses, other_weights) in zip(without, with_evaluation, strict=True):
        assert other_losses == losses
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def modes_and_buffers() -> tuple[list[bool], list[bool], list[float]]:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    module[1].eval()
    module[0].running_mean.fill_(float(current().rank + 1))
    seen = []
    with undisturbed(module, current()) as inner:
        seen.append(float(inner[0].running_mean[0]))
        modes = [inner[0].training, inner[1].training]
        inner[0](torch.randn(2, 3))
    seen.append(float(module[0].running_mean[0]))
    return modes, [module[0].training, module[1].training], seen


def test_running_statistics_are_rank_0s_inside_and_each_ranks_own_after(ranks: Any):
    for rank, (inside, after, (shared, own)) in enumerate(ranks(2).run(modes_and_buffers)):
        assert inside == [False, False]
        assert after == [True, False]
        assert (shared, own) == (1.0, rank + 1.0)


def fail_on_rank_1() -> str:
    def batches() -> Iterator[int]:
        yield 0
        if current().rank == 1:
            raise UserError("shard 7.tar is damaged")
        yield 1

    try:
        list(lockstep(batches(), current(), "pairs"))
    except UserError as error:
        return str(error)
    return "no error"


def test_a_rank_that_cannot_read_its_data_is_everybodys_failure(ranks: Any):
    for message in ranks(2).run(fail_on_rank_1):
        assert message.startswith("shard 7.tar is damaged")
        assert "rank 1" in message


def read_slowly(kind: str) -> int:
    world = dist.group.WORLD
    assert world is not None
    module = small.engine(kind).module
    limit = 10
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit), world)

    def batches() -> Iterator[Tensor]:
        for _ in range(2):
            if current().rank == 1:
                time.sleep(limit + 2)
            yield torch.zeros(1, 3, small.SIZE, small.SIZE)

    try:
        turns = 0
        with undisturbed(module, current()) as encoder:
            for pixels in lockstep(batches(), current(), "pictures"):
                encoder(image=pixels)
                turns += 1
        return turns
    finally:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANG_SECONDS), world)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_b03_slow_reading_does_not_meet_the_collectives_time_limit(ranks: Any, kind: str):
    assert ranks(2).run(read_slowly, kind) == [2, 2]
