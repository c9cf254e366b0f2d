"""Padding is left out only where the tower cannot see it, and then makes no difference."""

from typing import Any

import pytest
import torch
from evaluation import small
from open_clip.transformer import TextTransformer
from torch import nn

from shardclip.training.evaluation.padding import without_padding


def tower(**settings: Any) -> TextTransformer:
    torch.manual_seed(0)
    return TextTransformer(
        context_length=24, vocab_size=64, width=32, heads=2, layers=2, output_dim=16, **settings
    ).eval()


def tokens() -> torch.Tensor:
    padded = torch.zeros(3, 24, dtype=torch.int64)
    padded[:, :12] = small.tokenize(["a", "one cat", ""])
    return padded


@pytest.mark.parametrize("settings", [{"pool_type": "argmax"}, {"pool_type": "eos", "eos_id": 63}])
def test_a_causal_tower_gives_the_same_features(settings: dict[str, Any]):
    causal = tower(**settings)
    with torch.no_grad(), without_padding(causal, tokens()) as short:
        assert short.shape == (3, 8)
        features = causal(short)
    assert causal.attn_mask.shape == (24, 24)
    with torch.no_grad():
        assert torch.allclose(features, causal(tokens()), atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"pool_type": "last"}, {"no_causal_mask": True}, {"embed_cls": True}, {"pad_id": 1}],
)
def test_a_tower_that_may_see_padding_gets_it(settings: dict[str, Any]):
    with without_padding(tower(**settings), tokens()) as given:
        assert torch.equal(given, tokens())


def test_a_tower_of_another_kind_gets_all():
    with without_padding(nn.Identity(), tokens()) as given:
        assert torch.equal(given, tokens())


def test_a_full_row_stays_whole():
    full = torch.full((2, 24), 5)
    with without_padding(tower(), full) as given:
        assert torch.equal(given, full)
