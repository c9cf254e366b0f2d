"""The contrastive and distillation losses on one process, against autograd and against open_clip."""

import pytest
import torch
import torch.nn.functional as F
from loss_reference import LOSSES, assert_equal, expected, ours, parts
from open_clip.loss import ClipLoss, DistillClipLoss, SigLipLoss
from torch import Tensor

from shardclip.models.losses.distill import distillation
from shardclip.models.losses.gather import GlobalBatch, duplicate_rate, gather
from shardclip.models.losses.sigmoid import sigmoid_contrastive
from shardclip.models.losses.softmax import softmax_contrastive

LAYOUTS = {
    "paired": "PPPPPPPPPPP",
    "unpaired negatives": "PITPPTIPPIT",
    "no pair": "IITTTI",
    "no images": "TTT",
    "no texts": "IIII",
    "nothing": "",
}


@pytest.mark.parametrize("tile", [1, 3, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_autograd(loss: str, layout: str, tile: int) -> None:
    """Value and all gradients, to 1e-10, whatever the sides that are missing and the tiles."""
    (part,) = parts([LAYOUTS[layout]])
    assert_equal(ours(part, loss, tile), expected([part], loss), 1e-10)


def _paired(samples: int = 10, width: int = 8, **kind: torch.dtype) -> tuple[Tensor, Tensor, GlobalBatch]:
    generator = torch.Generator().manual_seed(3)
    images, texts = (
        F.normalize(torch.randn(samples, width, generator=generator, dtype=torch.float64), dim=1).to(**kind)
        for _ in range(2)
    )
    rows = torch.arange(samples)
    batch = gather(images, texts, rows, rows, rows)
    return images.requires_grad_(), texts.requires_grad_(), batch


def _scalar(value: float, kind: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=kind, requires_grad=True)


def _gradients(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def _assert_all_close(ours_: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours_, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_equals_open_clip_cliploss() -> None:
    images, texts, batch = _paired()
    leaves = (images, texts, _scalar(7.0))
    _assert_all_close(
        _gradients(softmax_contrastive(*leaves, batch, tile=4), *leaves),
        _gradients(ClipLoss()(*leaves), *leaves),
    )


def test_equals_open_clip_sigliploss() -> None:
    images, texts, batch = _paired()
    leaves = (images, texts, _scalar(7.0), _scalar(-3.0))
    _assert_all_close(
        _gradients(sigmoid_contrastive(*leaves, batch, tile=4), *leaves),
        _gradients(SigLipLoss()(*leaves), *leaves),
    )


def test_equals_open_clip_distillcliploss() -> None:
    images, texts, batch = _paired()
    teacher_images, teacher_texts, _ = _paired(width=5)
    leaves = (images, texts, _scalar(7.0))
    teacher = (teacher_images.detach(), teacher_texts.detach())
    _assert_all_close(
        _gradients(
            distillation(*leaves, batch, batch.with_features(*teacher), torch.tensor(9.0).double(), tile=4),
            *leaves,
        ),
        _gradients(DistillClipLoss()(*leaves, *teacher, torch.tensor(9.0).double())[1], *leaves),
    )


def test_bias_changes_nothing_in_a_softmax() -> None:
    images, texts, batch = _paired()
    bias = _scalar(-5.0)
    without = softmax_contrastive(images, texts, _scalar(7.0), batch)
    with_bias = softmax_contrastive(images, texts, _scalar(7.0), batch, logit_bias=bias)
    assert with_bias.item() == without.item()
    (gradient,) = torch.autograd.grad(with_bias, bias)
    assert gradient.item() == 0


@pytest.mark.parametrize("scale", [14.3, 100.0])
def test_fp32_is_as_near_the_truth_as_autograd(scale: float) -> None:
    """fp32 features of a trained model (pairs that agree), up to the largest scale that CLIP allows."""
    generator = torch.Generator().manual_seed(5)
    centre = torch.randn(300, 64, generator=generator, dtype=torch.float64)
    exact_features = [
        F.normalize(centre + 0.5 * torch.randn(300, 64, generator=generator, dtype=torch.float64), dim=1)
        for _ in range(2)
    ]
    rows = torch.arange(300)
    runs: dict[str, list[Tensor]] = {}
    for name, kind in (("truth", torch.float64), ("autograd", torch.float32), ("ours", torch.float32)):
        leaves = (*(f.float().to(kind).requires_grad_() for f in exact_features), _scalar(scale, kind))
        if name == "ours":
            batch = gather(leaves[0], leaves[1], rows, rows, rows)
            runs[name] = _gradients(softmax_contrastive(*leaves, batch, tile=100), *leaves)
        else:
            runs[name] = _gradients(ClipLoss()(*leaves), *leaves)
    for truth, autograd, mine in zip(*runs.values(), strict=True):
        error = torch.linalg.vector_norm(mine - truth) / torch.linalg.vector_norm(truth)
        peer_error = torch.linalg.vector_norm(autograd - truth) / torch.linalg.vector_norm(truth)
        assert error <= max(2 * peer_error, 1e-6)


def test_low_precision_is_raised() -> None:
    """bf16 features: the loss is that of the same numbers in fp32, and the gradient comes back in bf16."""
    images, texts, batch = _paired(dtype=torch.bfloat16)
    leaves = (images, texts, _scalar(7.0, torch.float32))
    value = softmax_contrastive(*leaves, batch)
    wide = (images.detach().float().requires_grad_(), texts.detach().float().requires_grad_(), leaves[2])
    reference = _gradients(ClipLoss()(*wide), *wide)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.detach(), reference[0])
    gradients = torch.autograd.grad(value, leaves)
    for gradient, leaf, wanted in zip(gradients, leaves, reference[1:], strict=True):
        assert gradient.dtype == leaf.dtype
        torch.testing.assert_close(gradient, wanted.to(leaf.dtype))


@pytest.mark.parametrize("loss", LOSSES)
def test_autocast_does_not_reach_the_loss(loss: str) -> None:
    (part,) = parts(["PPPPITPP"], dtype=torch.float32)
    plain = ours(part, loss, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ours(part, loss, 3)
    assert_equal(cast, plain, 0.0)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_without_gradients(loss: str) -> None:
    """Validation: the same value under no_grad, without a graph."""
    images, texts, batch = _paired()
    function = {
        "softmax": lambda: softmax_contrastive(images, texts, _scalar(7.0), batch),
        "sigmoid": lambda: sigmoid_contrastive(images, texts, _scalar(7.0), _scalar(-3.0), batch),
    }[loss]
    with torch.no_grad():
        value = function()
    assert not value.requires_grad
    assert value.item() == function().item()


@pytest.mark.parametrize("frozen", [{"images"}, {"texts"}, {"images", "texts"}, {"scale"}])
def test_locked_towers(frozen: set[str]) -> None:
    """The gradients that are asked for do not depend on those that are not."""
    images, texts, batch = _paired()
    leaves = {"images": images, "texts": texts, "scale": _scalar(7.0), "bias": _scalar(-3.0)}
    complete = _gradients(sigmoid_contrastive(*leaves.values(), batch, tile=4), *leaves.values())
    some = {name: leaf.detach() if name in frozen else leaf for name, leaf in leaves.items()}
    value = sigmoid_contrastive(*some.values(), batch, tile=4)
    asked = [name for name in leaves if name not in frozen]
    found = torch.autograd.grad(value, [leaves[name] for name in asked])
    for name, gradient in zip(asked, found, strict=True):
        torch.testing.assert_close(gradient, complete[1 + list(leaves).index(name)], rtol=1e-12, atol=1e-14)


def test_weights_of_several_losses_multiply() -> None:
    """The loss as one term of a sum: backward scales the known gradients."""
    images, texts, batch = _paired()
    leaves = (images, texts, _scalar(7.0))
    once = _gradients(softmax_contrastive(*leaves, batch), *leaves)
    thrice = _gradients(3 * softmax_contrastive(*leaves, batch), *leaves)
    _assert_all_close(thrice, [3 * gradient for gradient in once])


def test_b46_equal_captions_by_hand() -> None:
    """Four pairs, the second and the fourth with one caption: neither is a negative of the other."""
    identity = torch.eye(4, dtype=torch.float64)
    rows = torch.arange(4)
    batch = gather(identity, identity, rows, rows, torch.tensor([7, 5, 8, 5]))
    images, texts = identity.clone().requires_grad_(), identity.clone().requires_grad_()
    value = softmax_contrastive(images, texts, _scalar(1.0), batch, mask_duplicates=True)
    e = torch.e
    # logits: 1 for a pair, 0 for all others; rows 0 and 2 have three negatives, rows 1 and 3 have two.
    by_hand = (2 * torch.log(torch.tensor((e + 3) / e)) + 2 * torch.log(torch.tensor((e + 2) / e))) / 4
    assert value.item() == pytest.approx(by_hand.item(), rel=1e-6)
    value.backward()
    assert images.grad is not None
    assert texts.grad is not None
    # The gradient of image 1 along text 3 is the slope of their logit, and so on: all four are 0.
    assert images.grad[1, 3] == images.grad[3, 1] == texts.grad[1, 3] == texts.grad[3, 1] == 0
    # A negative that is not masked: (p(text 0 | image 1) + p(image 1 | text 0)) / (2 * 4 pairs).
    assert images.grad[1, 0].item() == pytest.approx((1 / (e + 2) + 1 / (e + 3)) / 8)
    assert duplicate_rate(batch).item() == 0.5


def test_b46_masking_goes_below_the_floor_of_repeated_captions() -> None:
    """8 colours, 32 samples: perfect features cannot get below ln 4 unless equal captions are masked."""
    colours = torch.arange(32) % 8
    features = torch.eye(8, dtype=torch.float64)[colours]
    rows = torch.arange(32)
    batch = gather(features, features, rows, rows, colours)
    scale = torch.tensor(100.0, dtype=torch.float64)
    floor = torch.tensor(4.0).log().item()
    assert duplicate_rate(batch).item() == 1
    assert softmax_contrastive(features, features, scale, batch).item() == pytest.approx(floor, rel=1e-6)
    assert softmax_contrastive(features, features, scale, batch, mask_duplicates=True).item() < 1e-6


def test_samples_without_a_caption_are_not_duplicates() -> None:
    (part,) = parts(["IIPP"], captions=5)
    batch = gather(
        part.image_features, part.text_features, part.image_sample, part.text_sample, part.caption_id
    )
    assert duplicate_rate(batch).item() == 0
    assert len(set(batch.image_caption.tolist())) == 4
    (empty,) = parts([""])
    nothing = gather(
        empty.image_features, empty.text_features, empty.image_sample, empty.text_sample, empty.caption_id
    )
    assert duplicate_rate(nothing).item() == 0


def test_features_must_be_those_that_were_gathered() -> None:
    images, texts, batch = _paired()
    with pytest.raises(ValueError, match="9 images and 10 texts"):
        softmax_contrastive(images[:9], texts, _scalar(7.0), batch)
    with pytest.raises(ValueError, match="10 images with 3 sample numbers"):
        gather(images, texts, torch.arange(3), torch.arange(10), torch.arange(10))
