"""Padding is left out only where the tower cannot see it, and then makes no difference."""

from typing import Any

import pytest
import torch
from evaluation import small
from open_clip.transformer import TextTransformer
from torch import nn

from shardclip.models.padding import mask_of_length, sees_padding, without_padding


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
def test_a_causal_tower_gives_the_same_features_and_gradients(settings: dict[str, Any]):
    causal = tower(**settings)
    short = without_padding(tokens())
    assert short.shape == (3, 8)
    assert not sees_padding(causal)
    found = []
    for given in (tokens(), short):
        causal.zero_grad()
        with mask_of_length(causal, given.shape[1]):
            features = causal(given)
        features[:, 0].sum().backward()
        found.append((features.detach(), {n: p.grad.clone() for n, p in causal.named_parameters()}))
    (whole, whole_gradients), (cut, cut_gradients) = found
    assert torch.allclose(whole, cut, atol=1e-6)
    size = max(gradient.norm() for gradient in whole_gradients.values())
    for name, gradient in whole_gradients.items():
        assert (gradient - cut_gradients[name]).norm() <= 1e-6 * size, name
    assert causal.attn_mask.shape == (24, 24)


@pytest.mark.parametrize(
    "settings",
    [{"pool_type": "last"}, {"no_causal_mask": True}, {"embed_cls": True}, {"pad_id": 1}],
)
def test_a_tower_that_may_see_padding_is_known(settings: dict[str, Any]):
    assert sees_padding(tower(**settings))


def test_a_tower_of_another_kind_is_taken_to_see_it():
    assert sees_padding(nn.Identity())


def test_a_full_row_stays_whole():
    full = torch.full((2, 24), 5)
    assert torch.equal(without_padding(full), full)
    assert without_padding(torch.zeros(2, 24, dtype=torch.int64)).shape == (2, 8)
