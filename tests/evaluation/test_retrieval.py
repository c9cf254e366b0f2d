"""Ranks, ties and the loss of retrieval against the definition written out on the whole matrix."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from launched import HANG_SECONDS
from torch import Tensor

from shardclip.errors import UserError
from shardclip.training.distributed import current
from shardclip.training.evaluation.retrieval import Side, retrieval
from shardclip.training.evaluation.scores import count_ahead


def by_definition(images: Side, texts: Side, scale: float) -> dict[str, float]:
    """The figures from the whole matrix of scores, by sorting each row."""
    scores = images.features @ texts.features.T
    match = images.sample[:, None] == texts.sample
    figures: dict[str, float] = {}
    for name, table, same in (("image_to_text", scores, match), ("text_to_image", scores.T, match.T)):
        ranks = []
        for row, hits in zip(table.tolist(), same.tolist(), strict=True):
            if any(hits):
                ranking = sorted(range(len(row)), key=lambda column: (-row[column], column))
                ranks.append(min(ranking.index(column) for column, hit in enumerate(hits) if hit))
        for k in (1, 5, 10):
            figures[f"{name}_R@{k}"] = sum(rank < k for rank in ranks) / len(ranks)
        figures[f"{name}_mean_rank"] = sum(ranks) / len(ranks) + 1
        middle = sorted(ranks)
        median = (middle[(len(ranks) - 1) // 2] + middle[len(ranks) // 2]) / 2
        figures[f"{name}_median_rank"] = math.floor(median) + 1
    paired = [s for s in images.sample.unique().tolist() if s in texts.sample.tolist()]
    rows = [images.sample.tolist().index(sample) for sample in paired]
    columns = [texts.sample.tolist().index(sample) for sample in paired]
    logits = scale * (images.features[rows].double() @ texts.features[columns].double().T)
    target = torch.arange(len(paired))
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    return figures | {"clip_val_loss": float(loss)}


def unit(rows: int, width: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)), dim=1)


@pytest.mark.parametrize("chunk_size", [7, 64, 4096])
def test_tiles_give_what_the_whole_matrix_gives(chunk_size: int):
    images, texts = Side(unit(50, 8, 0), torch.arange(50)), Side(unit(50, 8, 1), torch.arange(50))
    got = retrieval(images, texts, 20.0, processes=current(), chunk_size=chunk_size)
    assert got == pytest.approx(by_definition(images, texts, 20.0), abs=1e-6)


@pytest.mark.parametrize("chunk_size", [9, 4096])
def test_b56_ties_and_three_captions_an_image(chunk_size: int):
    # Few distinct vectors with exact scores: most of the ranking is ties.
    generator = torch.Generator().manual_seed(0)
    image_features = torch.randint(-1, 2, (40, 4), generator=generator) / 2
    text_features = torch.randint(-1, 2, (120, 4), generator=generator) / 2
    images = Side(image_features, torch.arange(40))
    texts = Side(text_features, torch.arange(120) // 3)
    got = retrieval(images, texts, 5.0, processes=current(), chunk_size=chunk_size)
    assert got == pytest.approx(by_definition(images, texts, 5.0), abs=1e-6)


def test_unpaired_rows_are_candidates_and_no_queries():
    images = Side(unit(20, 8, 2), torch.arange(20))
    # Samples 5 to 9 have no text, samples 20 to 29 no image.
    texts = Side(unit(25, 8, 3), torch.cat([torch.arange(5), torch.arange(10, 30)]))
    got = retrieval(images, texts, 10.0, processes=current(), chunk_size=6)
    assert got == pytest.approx(by_definition(images, texts, 10.0), abs=1e-6)


def test_a_model_that_gives_everything_one_score_is_at_chance():
    features = torch.ones(40, 4) / 2
    side = Side(features, torch.arange(40))
    got = retrieval(side, side, 100.0, processes=current(), chunk_size=16)
    assert got["image_to_text_R@1"] == 1 / 40
    assert got["image_to_text_mean_rank"] == pytest.approx(20.5)
    assert got["clip_val_loss"] == pytest.approx(math.log(40), abs=1e-6)


def test_as_open_clip_without_ties():
    from open_clip_train.train import get_clip_metrics

    images, texts = Side(unit(64, 16, 4), torch.arange(64)), Side(unit(64, 16, 5), torch.arange(64))
    theirs = get_clip_metrics(images.features, texts.features, torch.tensor(30.0))
    got = retrieval(images, texts, 30.0, processes=current(), chunk_size=10)
    assert {name: got[name] for name in theirs} == pytest.approx(theirs, abs=1e-9)


def test_the_loss_is_precise_at_the_highest_scale():
    images = Side(unit(300, 16, 6), torch.arange(300))
    texts = Side(F.normalize(images.features + 2 * unit(300, 16, 7), dim=1), torch.arange(300))
    got = retrieval(images, texts, 100.0, processes=current(), chunk_size=64)
    assert got["clip_val_loss"] == pytest.approx(
        by_definition(images, texts, 100.0)["clip_val_loss"], rel=1e-6
    )


def test_count_ahead_settles_ties_by_order():
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    for column, expected in ((1, 0), (2, 1), (4, 2), (0, 3), (3, 4)):
        target = torch.tensor([column])
        assert count_ahead(scores, scores[:, column], target, torch.arange(5)).tolist() == [expected]


def test_no_pair_is_a_users_error():
    with pytest.raises(UserError, match="no sample has both"):
        retrieval(
            Side(unit(3, 4, 0), torch.arange(3)),
            Side(unit(3, 4, 1), torch.arange(3) + 3),
            1.0,
            processes=current(),
        )


LIMITED = """
import resource, torch
import torch.nn.functional as F
from shardclip.training.distributed import current
from shardclip.training.evaluation.retrieval import Side, retrieval
torch.set_num_threads(1)
features = F.normalize(torch.randn(30_000, 32, generator=torch.Generator().manual_seed(0)), dim=1)
side = Side(features, torch.arange(30_000))
retrieval(side.rows(0, 100), side.rows(0, 100), 1.0, processes=current())  # libraries load what they need
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 1_500_000_000,) * 2)
try:
    features @ features.T
except RuntimeError as error:
    print("the whole matrix does not fit")
figures = retrieval(side, side, 10.0, processes=current())
print(figures["image_to_text_R@1"], figures["text_to_image_mean_rank"])
"""


@pytest.mark.long
def test_b56_thirty_thousand_pairs_in_bounded_memory():
    # The limit counts from what an interpreter with torch takes: its libraries alone map more than 1.5 GB.
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert ran.stdout.splitlines() == ["the whole matrix does not fit", "1.0 1.0"], ran.stderr
