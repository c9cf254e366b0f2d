"""The caption loss against autograd, and against open_clip's on one process."""

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import CoCaLoss
from torch import Tensor

from shardclip.models.losses.caption import caption_cross_entropy, count_targets

PAD, WORDS = 0, 23


def _captions(rows: int, length: int, kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, length, WORDS, generator=generator, dtype=torch.float64).to(kind)
    labels = torch.randint(1, WORDS, (rows, length), generator=generator)
    for row in range(rows):
        labels[row, 1 + row % length :] = PAD
    return logits.requires_grad_(), labels


def test_equals_open_clip_cocaloss() -> None:
    logits, labels = _captions(70, 9)
    value = caption_cross_entropy(logits, labels, count_targets(labels, PAD), pad_id=PAD)
    _, reference = CoCaLoss(1.0, 0.0, pad_id=PAD)(None, None, logits, labels, None)
    torch.testing.assert_close(value, reference, rtol=1e-12, atol=0)
    (ours,), (theirs,) = torch.autograd.grad(value, logits), torch.autograd.grad(reference, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("parts", [[70], [35, 35], [1, 2, 60, 7], [0, 70]])
def test_shares_add_up(parts: list[int]) -> None:
    """Over ranks and micro-batches of any size: the sum of the shares is the mean over all tokens."""
    logits, labels = _captions(70, 9)
    tokens = count_targets(labels, PAD)
    shares = [
        caption_cross_entropy(some, wanted, tokens, pad_id=PAD)
        for some, wanted in zip(logits.split(parts), labels.split(parts), strict=True)
    ]
    whole = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    torch.testing.assert_close(torch.stack(shares).sum(), whole, rtol=1e-12, atol=0)
    (ours,) = torch.autograd.grad(torch.stack(shares).sum(), logits)
    torch.testing.assert_close(ours, torch.autograd.grad(whole, logits)[0], rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("tokens", [0, 17])
def test_nothing_to_predict(rows: int, tokens: int) -> None:
    """No row, or padding alone: 0 with a graph, never NaN, whether or not other ranks have targets."""
    logits, labels = _captions(rows, 5)
    value = caption_cross_entropy(logits, torch.full_like(labels, PAD), tokens, pad_id=PAD)
    assert value.item() == 0
    value.backward()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape
    assert not logits.grad.any()


def test_negative_pad_is_ignored() -> None:
    logits, labels = _captions(6, 5)
    marked = labels.where(labels != PAD, -100)
    value = caption_cross_entropy(logits, marked, count_targets(marked, -100), pad_id=-100)
    reference = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    torch.testing.assert_close(value, reference, rtol=1e-12, atol=0)
    (ours,), (theirs,) = torch.autograd.grad(value, logits), torch.autograd.grad(reference, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-16)


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits, labels = _captions(70, 9, torch.bfloat16)
    value = caption_cross_entropy(logits, labels, count_targets(labels, PAD), pad_id=PAD)
    wide = logits.detach().float().requires_grad_()
    reference = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, reference, rtol=1e-6, atol=0)
    (ours,), (theirs,) = torch.autograd.grad(value, logits), torch.autograd.grad(reference, wide)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs.bfloat16())
