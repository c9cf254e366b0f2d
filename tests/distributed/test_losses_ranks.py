"""The losses on several processes: one gradient, whatever each of them holds."""

from collections.abc import Callable

import pytest
import torch
from loss_reference import LOSSES, Outcome, assert_equal, expected, joined, ours, parts
from ranks import RankPool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardclip.models.losses.caption import caption_cross_entropy, count_targets
from shardclip.models.losses.gather import duplicate_rate, gather
from shardclip.models.losses.sigmoid import sigmoid_contrastive
from shardclip.models.losses.softmax import softmax_contrastive

LAYOUTS = {
    "alike": ["PPPP"] * 4,
    "uneven": ["PPPPPPP", "P", "PPP", "PPPP"],
    "a rank without images": ["PPPP", "TTT", "PPP", "PP"],
    "a rank without texts": ["III", "PPPP", "PP", "PPP"],
    "nobody with images": ["TTT", "TT", "", "TTTT"],
    "unpaired negatives": ["PITTPPI", "TTPIP", "IPPPT", "PTI"],
    "a rank without samples": ["", "PPPPP", "PPI", "PTP"],
    "nothing": [""] * 4,
}
Ranks = Callable[[int], RankPool]


def _evaluate(layout: list[str], loss: str, tile: int) -> Outcome:
    return ours(parts(layout)[torch.distributed.get_rank()], loss, tile)


def _check(ranks: Ranks, layout: list[str], loss: str, tile: int = 3) -> None:
    found = joined(ranks(len(layout)).run(_evaluate, layout, loss, tile))
    assert_equal(found, expected(parts(layout), loss), 1e-10)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_b09_gradient_is_that_of_one_process(ranks: Ranks, loss: str, layout: str, world_size: int) -> None:
    """Value, features of both sides, scale and bias to 1e-10; value, scale and bias the same on all ranks."""
    _check(ranks, LAYOUTS[layout][:world_size], loss)


@pytest.mark.parametrize("layout", [["PPPPPPPPPPPPPPPP"], ["PPPPPPPP"] * 2, ["PPPP"] * 4])
def test_b10_norm_does_not_depend_on_the_number_of_ranks(ranks: Ranks, layout: list[str]) -> None:
    """A global batch of 16, once whole and once with three samples of the second quarter unpaired."""
    for samples in ("PPPPPPPPPPPPPPPP", "PPPPITIPPPPPPPPP"):
        size = 16 // len(layout)
        split = [samples[start : start + size] for start in range(0, 16, size)]
        for loss in ("softmax", "sigmoid"):
            _check(ranks, split, loss)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_b11_sigmoid_in_any_tiles(ranks: Ranks, world_size: int) -> None:
    """Chunked and whole loss alike, for odd and even numbers of ranks."""
    for tile in (1, 2, 5, 2048):
        _check(ranks, ["PPPPP"] * world_size, "sigmoid", tile)


def _peak_bytes(rows: int, width: int, loss: str) -> tuple[int, int]:
    """(peak of what one loss and its backward allocate besides the gathered features, their size)."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    images, texts = (
        torch.nn.functional.normalize(torch.randn(rows, width, generator=generator), dim=1) for _ in range(2)
    )
    leaves = [t.requires_grad_() for t in (images, texts, torch.tensor(10.0), torch.tensor(-10.0))]
    samples = torch.arange(rows)
    batch = gather(images, texts, samples, samples, samples)
    with torch.profiler.profile(profile_memory=True) as profiler:
        if loss == "softmax":
            value = softmax_contrastive(*leaves[:3], batch, tile=128)
        else:
            value = sigmoid_contrastive(*leaves, batch, tile=128)
        value.backward()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak, batch.image_features.nbytes + batch.text_features.nbytes


@pytest.mark.long
def test_b12_peak_memory_is_flat_in_the_number_of_ranks(ranks: Ranks) -> None:
    """Local batch 512, width 256: less than 20 % more on 8 ranks than on 2, the features themselves apart."""
    many = RankPool(8)
    for loss in ("softmax", "sigmoid"):
        peaks = {}
        for pool in (ranks(2), many):
            (peaks[pool.world_size], features), *_ = pool.run(_peak_bytes, 512, 256, loss)
            assert features == pool.world_size * 512 * 256 * 4 * 2
        # Two gradients of 512 KiB and tiles of 64 KiB; one rank's part of the logits would be 1 MiB a rank.
        assert 1e6 < peaks[2] < 4e6
        assert peaks[8] < 1.2 * peaks[2]
    many.close()


def _shuffled(layout: list[str]) -> tuple[float, list[int], list[int], float]:
    part = parts(layout, captions=4)[torch.distributed.get_rank()]
    batch = gather(
        part.image_features, part.text_features, part.image_sample, part.text_sample, part.caption_id
    )
    assert batch.pairs == 7
    own = batch.image_features[batch.own_images]
    assert torch.equal(own, part.image_features)
    return (
        duplicate_rate(batch).item(),
        batch.image_sample.tolist(),
        batch.text_caption.tolist(),
        batch.image_features.sum().item(),
    )


def test_b46_gathered_ids_and_duplicate_rate(ranks: Ranks) -> None:
    """Sample numbers are unique over ranks; captions 0 1 2 3 0 1 2 3 0 are those of 9 of 11 samples."""
    layout = ["PPIPP", "", "PTPPTI"]
    answers = ranks(3).run(_shuffled, layout)
    assert answers[0] == answers[1] == answers[2]
    rate, image_sample, text_caption, _ = answers[0]
    assert sorted(image_sample) == [0, 1, 2, 3, 4, 5, 7, 8, 10]
    assert sorted(text_caption) == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert rate == pytest.approx(9 / 11)


class _Collectives(TorchDispatchMode):
    """Names of the collectives that are issued."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def _collectives(layout: list[str], loss: str, gradients: bool) -> list[str]:
    part = parts(layout)[torch.distributed.get_rank()]
    with _Collectives() as seen, torch.set_grad_enabled(gradients):
        if gradients:
            ours(part, loss, 3)
        else:
            _validate(part, loss)
    return seen.names


def _validate(part, loss: str) -> Tensor:  # type: ignore[no-untyped-def]
    batch = gather(
        part.image_features, part.text_features, part.image_sample, part.text_sample, part.caption_id
    )
    scale, bias = torch.tensor(9.0), torch.tensor(-2.5)
    if loss == "softmax":
        return softmax_contrastive(part.image_features, part.text_features, scale, batch)
    return sigmoid_contrastive(part.image_features, part.text_features, scale, bias, batch)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_same_collectives_whatever_a_rank_holds(ranks: Ranks, loss: str, gradients: bool) -> None:
    """Promise 3; and they are few: counts, ids, two sides of features, (normalisers,) three sums."""
    for layout in (["PPPP", "TTT", ""], ["TT", "", ""], ["III", "TT", "P"], ["", "", ""]):
        seen = ranks(3).run(_collectives, layout, loss, gradients)
        assert seen[0] == seen[1] == seen[2]
        assert 2 <= len(seen[0]) <= (6 if loss == "softmax" else 5)


def _captions(lengths: list[list[int]]) -> tuple[Tensor, Tensor]:
    """One rank's share of the caption loss and its gradient."""
    logits, labels = _caption_inputs(lengths, torch.distributed.get_rank())
    tokens = torch.tensor(count_targets(labels, 0))
    torch.distributed.all_reduce(tokens)
    value = caption_cross_entropy(logits, labels, int(tokens), pad_id=0)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def _caption_inputs(lengths: list[list[int]], rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    logits = torch.randn(len(lengths[rank]), 6, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(1, 11, logits.shape[:2], generator=generator)
    labels[torch.arange(6) >= torch.tensor(lengths[rank], dtype=torch.int64)[:, None]] = 0
    return logits.requires_grad_(), labels


@pytest.mark.parametrize("lengths", [[[1, 1], [6, 5]], [[], [3, 2]], [[0, 0], [4]], [[0], [0]]])
def test_captions_do_not_depend_on_how_tokens_fall_on_ranks(ranks: Ranks, lengths: list[list[int]]) -> None:
    """Short captions, none, or padding alone on one rank; padding alone on both."""
    shares, gradients = zip(*ranks(2).run(_captions, lengths), strict=True)
    inputs = [_caption_inputs(lengths, rank) for rank in range(2)]
    logits, labels = (torch.cat(some) for some in zip(*inputs, strict=True))
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum"
    )
    whole = total / max(int((labels != 0).sum()), 1)
    torch.testing.assert_close(torch.stack(shares).sum(), whole.detach(), rtol=1e-10, atol=0)
    wanted = torch.autograd.grad(whole, logits)[0]
    torch.testing.assert_close(torch.cat(gradients), wanted, rtol=1e-10, atol=1e-16)
