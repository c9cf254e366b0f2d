"""Packed captions give the features and gradients of one caption a row, and only real tokens are computed."""

from typing import Any

import pytest
import tiny
import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardclip.models.packing import EndMark, PackedTexts, end_mark, fit, pack, take_packed
from shardclip.training.throughput import forward_flops

CONTEXT, WORDS = 77, 100
CPU = torch.device("cpu")
START, END = WORDS - 2, WORDS - 1


def tower(**settings: Any) -> TextTransformer:
    torch.manual_seed(0)
    given = {"output_dim": 16, **settings}
    return TextTransformer(context_length=CONTEXT, vocab_size=WORDS, width=32, heads=2, layers=2, **given)


def captions() -> Tensor:
    """Of every length from the empty one (start and end mark) to the full one; one more that was cut.

    What was cut ends with a forced end mark; beside it an end mark occurs early, and one caption has words
    after its end mark: the first mark counts.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randperm(CONTEXT - 1, generator=generator).tolist()
    tokens = torch.zeros(len(lengths) + 2, CONTEXT, dtype=torch.int64)
    for row, more in enumerate([*lengths, CONTEXT - 2, 8]):
        tokens[row, 0] = START
        tokens[row, 1 : more + 1] = torch.randint(1, START, (more,), generator=generator)
        tokens[row, more + 1] = END
    tokens[-1, 4], tokens[-1, 12:20] = END, 5
    return tokens


def features_and_gradients(model: nn.Module, texts: Tensor | PackedTexts) -> dict[str, Tensor]:
    """Features, and gradients by name, of a loss that weighs all features differently."""
    model.zero_grad()
    features = model(texts)
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).to(features.dtype)
    (features * weights).sum().backward()
    return {"features": features.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of the features or of a gradient.

    Attention does not depend on the bias of its keys: such a gradient is rounding errors, and is measured
    against a thousandth of the whole gradient's norm.
    """
    assert found.keys() == expected.keys()
    whole = torch.stack([value.norm() for name, value in expected.items() if name != "features"]).norm()
    of_features = (found["features"] - expected["features"]).norm() / expected["features"].norm()
    of_gradients = (
        ((found[name] - value).norm() / torch.maximum(value.norm(), 1e-3 * whole)).item()
        for name, value in expected.items()
        if name != "features"
    )
    return max(of_features.item(), *of_gradients)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pool_type": "eos", "eos_id": END},
        {"proj_bias": True, "ls_init_value": 0.5},
        {"proj_type": "none", "output_dim": None},
        {"qk_norm": True, "scale_heads": True, "scale_attn": True, "scale_fc": True},
    ],
    ids=["argmax", "eos", "linear projection", "no projection", "custom blocks"],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_features_and_gradients_are_those_of_a_caption_a_row(training, settings, dtype, bound):
    padded, packed = (tower(**settings).to(dtype).train(training) for _ in range(2))
    take_packed(packed)
    texts = pack(captions(), end_mark(packed))
    assert texts.tokens.numel() < 0.6 * captions().numel()
    expected = features_and_gradients(padded, captions())
    assert largest_error(features_and_gradients(packed, texts), expected) <= bound
    # Token ids of one caption a row are taken as before.
    assert largest_error(features_and_gradients(packed, captions()), expected) == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"pool_type": "last"},
        {"no_causal_mask": True},
        {"no_causal_mask": True, "use_pad_mask": True},
        {"embed_cls": True},
        {"pad_id": 1},
        {"output_tokens": True},
    ],
)
def test_towers_that_it_would_change_take_one_caption_a_row(settings):
    assert end_mark(tower(**settings)) is None
    assert end_mark(nn.Identity()) is None


def test_a_model_packs_what_its_text_tower_takes_packed():
    tokens = tiny.batch([], list(range(8)), 8).texts
    assert isinstance(tiny.build("clip").text_input(tokens, CPU), PackedTexts)
    assert torch.equal(tiny.build("coca").text_input(tokens, CPU), tokens)
    tokens = torch.full((3, 16), 5).index_fill(1, torch.tensor(15), 127)
    assert torch.equal(tiny.build("clip").text_input(tokens, CPU), tokens), "packing gains nothing"


def test_every_piece_has_a_place_of_its_own_and_rows_are_full():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(1000, generator=generator).mul(0.5).add(2.75).exp().clamp(2, 77).long().tolist()
    row_of, start_of = fit(lengths, 80)
    rows = max(row_of) + 1
    taken = torch.zeros(rows, 80, dtype=torch.int64)
    for row, start, length in zip(row_of, start_of, lengths, strict=True):
        assert start + length <= 80
        taken[row, start : start + length] += 1
    assert taken.max() == 1
    assert taken.sum() == sum(lengths)
    assert sum(lengths) > 0.97 * rows * 80


def test_a_packed_caption_is_found_again():
    texts = captions()
    mark = EndMark()
    packed = pack(texts, mark)
    for caption, length in enumerate(mark.lengths(texts).tolist()):
        mine = packed.captions == caption
        assert torch.equal(packed.tokens[mine], texts[caption, :length])
        assert torch.equal(packed.places[mine], torch.arange(length))
        assert mine.flatten().nonzero()[-1] == packed.ends[caption]


def test_a_few_short_captions_take_one_short_row():
    assert pack(captions()[:0], EndMark()).ends.shape == (0,)
    blank = tiny.blank_text()
    assert pack(blank, EndMark()).tokens.tolist() == [[126, 127, 0, 0, 0, 0, 0, 0]]


def test_flops_are_counted_for_the_tokens_that_are_computed():
    model = tiny.build("clip").to("meta")
    flops = forward_flops(model, (32, 32), 16)
    images, halves = torch.zeros(8, 3, 32, 32, device="meta"), torch.full((8, 16), 5)
    halves[:, 7] = 127
    full = torch.full((8, 16), 5, device="meta")
    packed = PackedTexts(*(part.to(images.device) for part in pack(halves, EndMark())))
    for texts, tokens in ((packed, 8), (full, 16)):
        with FlopCounterMode(display=False) as counter:
            model(images, texts)
        assert counter.get_total_flops() / 8 == pytest.approx(flops.of(tokens), rel=0.01)
