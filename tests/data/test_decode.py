"""Pixels: the exact path is open_clip's, the fast one is close, odd files come out as Pillow has them."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import Compose, Normalize, RandomResizedCrop, ToTensor

from shardclip.training.data import decode
from shardclip.training.data.decode import (
    Fast,
    Pixels,
    Undecodable,
    evaluation_decoder,
    resize,
    training_decoder,
)
from shardclip.training.data.image_input import ImageInput, normalise

SPEC = ImageInput(size=(32, 32))
LIMIT = 10**7


def scene(height: int, width: int) -> Image.Image:
    """A picture whose spectrum falls off about as a photograph's does."""
    chance = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    layers = []
    for _ in range(4):
        phases = np.exp(2j * np.pi * chance.random(frequency.shape))
        layer = np.fft.irfft2(frequency**-1.3 * phases, s=(height, width))
        layers.append(layer / layer.std())
    pixels = [127 + 45 * layers[3] + 12 * layer for layer in layers[:3]]
    return Image.fromarray(np.stack(pixels, -1).clip(0, 255).astype(np.uint8))


def encoded(picture: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def normalised(pixels: Pixels) -> torch.Tensor:
    """[3, 32, 32]: what the tower gets of decoded pixels."""
    return normalise(resize(pixels, (32, 32))[None], SPEC)[0]


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_exact_evaluation_is_open_clips_transform_bit_for_bit(mode: str, format: str) -> None:
    from open_clip.transform import image_transform

    spec = ImageInput(size=(32, 32), resize_mode=mode)  # type: ignore[arg-type]
    content = encoded(scene(64, 96), format)
    theirs = image_transform(32, is_train=False, mean=spec.mean, std=spec.std, resize_mode=mode)
    expected = theirs(Image.open(io.BytesIO(content)))
    assert torch.equal(normalised(evaluation_decoder(spec, LIMIT)(content, 0)), expected)


def test_exact_training_is_open_clips_transform_bit_for_bit() -> None:
    from open_clip.transform import image_transform

    augmentation = {"scale": (0.4, 1.0), "color_jitter": (0.3, 0.3, 0.3, 0.1), "color_jitter_prob": 0.8}
    content = encoded(scene(64, 96), "JPEG")
    theirs = image_transform(32, True, mean=SPEC.mean, std=SPEC.std, aug_cfg=augmentation)
    decoder = training_decoder(SPEC, augmentation, exact=True, max_pixels=LIMIT)
    for seed in range(5):
        random.seed(seed)
        torch.manual_seed(seed)
        expected = theirs(Image.open(io.BytesIO(content)))
        before = torch.get_rng_state(), random.getstate()
        assert torch.equal(normalised(decoder(content, seed)), expected)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]


def test_normalise_is_torchvisions() -> None:
    picture = scene(32, 32)
    expected = Compose([ToTensor(), Normalize(SPEC.mean, SPEC.std)])(picture)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    assert torch.equal(normalise(pixels[None], SPEC)[0], expected)


@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
@pytest.mark.parametrize(("height", "width"), [(256, 256), (384, 512), (512, 512), (150, 700)])
def test_fast_is_close_to_pillows_resize_of_the_same_crop(
    library: str, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "pillow":
        monkeypatch.setattr(decode, "simplejpeg", None)
    elif decode.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")
    content = encoded(scene(height, width), "JPEG", quality=90)
    whole = Image.open(io.BytesIO(content)).convert("RGB")
    fast = Fast(ImageInput(), {}, LIMIT)
    for seed in range(3):
        left, top, across, down = fast.crop(width, height, random.Random(seed))
        shrink = decode.power_of_two_below(min(across, down) / 224)
        left, top, across, down = (value // shrink * shrink for value in (left, top, across, down))
        box = (left, top, left + across, top + down)
        expected = whole.resize((224, 224), Image.Resampling.BICUBIC, box)
        got = resize(fast(content, seed), (224, 224)).permute(1, 2, 0).numpy().astype(int)
        assert np.abs(got - np.asarray(expected, dtype=int)).mean() <= 2.0


def test_crops_have_open_clips_distribution() -> None:
    """Area and shape within the bounds, on average as large; of an extreme picture the middle is taken."""
    fast = Fast(SPEC, {"scale": (0.3, 0.8)}, LIMIT)
    areas = []
    for seed in range(500):
        left, top, across, down = fast.crop(200, 150, random.Random(seed))
        assert 0 <= left <= 200 - across
        assert 0 <= top <= 150 - down
        assert 0.74 <= across / down <= 1.35
        areas.append(across * down / 30_000)
    theirs = []
    for seed in range(500):
        torch.manual_seed(seed)
        _, _, down, across = RandomResizedCrop.get_params(
            torch.empty(3, 150, 200), [0.3, 0.8], [3 / 4, 4 / 3]
        )
        theirs.append(across * down / 30_000)
    deviation = np.std(theirs) * (2 / 500) ** 0.5
    assert min(areas) >= 0.29
    assert max(areas) <= 0.81
    assert abs(np.mean(areas) - np.mean(theirs)) < 5 * deviation
    assert fast.crop(1000, 10, random.Random(0)) == (493, 0, 13, 10)


@pytest.mark.parametrize("decoder", ["fast", "exact"])
@pytest.mark.parametrize(
    ("format", "mode"),
    [
        *(("PNG", mode) for mode in ("P", "L", "LA", "RGBA", "I;16")),
        *(("JPEG", mode) for mode in ("L", "CMYK")),
        ("GIF", "P"),
        ("WEBP", "RGB"),
    ],
)
def test_every_kind_of_picture_comes_out_in_rgb(decoder: str, format: str, mode: str) -> None:
    picture = scene(64, 64)
    if mode == "I;16":
        picture = Image.fromarray(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64))
    content = encoded(picture.convert(mode) if picture.mode == "RGB" else picture, format)
    pixels = resize(training_decoder(SPEC, {}, decoder == "exact", LIMIT)(content, 0), SPEC.size)
    assert pixels.shape == (3, 32, 32)
    assert pixels.dtype == torch.uint8
    assert pixels.float().std() > 1


def test_a_picture_with_a_rotation_tag_stays_as_it_is_stored() -> None:
    """As open_clip and Pillow have it: EXIF orientation is not applied."""
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, tagged = (encoded(scene(64, 64), "JPEG", **extra) for extra in ({}, {"exif": exif}))
    for exact in (False, True):
        decoder = training_decoder(SPEC, {}, exact, LIMIT)
        assert np.array_equal(decoder(plain, 1), decoder(tagged, 1))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_picture_is_taken(format: str) -> None:
    first, second = scene(64, 64), scene(64, 64).transpose(Image.Transpose.ROTATE_90)
    moving = encoded(first, format, save_all=True, append_images=[second], lossless=True)
    with Image.open(io.BytesIO(moving)) as opened:
        assert opened.n_frames == 2
        still = encoded(opened.convert("RGB"), "PNG")
    # open_clip crops before it converts, so of a palette it takes the nearest colours
    for exact in (False,) if format == "GIF" else (False, True):
        decoder = training_decoder(SPEC, {}, exact, LIMIT)
        assert np.array_equal(decoder(moving, 1), decoder(still, 1))


@pytest.mark.parametrize("exact", [False, True])
def test_a_bomb_is_refused_from_its_header(exact: bool) -> None:
    content = encoded(Image.new("1", (20_000, 20_000)), "PNG")
    with pytest.raises(Undecodable, match="image too large"):
        training_decoder(SPEC, {}, exact, LIMIT)(content, 0)


def test_augmentations_beyond_the_crop_take_open_clips_transform() -> None:
    assert isinstance(training_decoder(SPEC, {"scale": (0.5, 1.0)}, False, LIMIT), Fast)
    assert not isinstance(training_decoder(SPEC, {"gray_scale_prob": 0.2}, False, LIMIT), Fast)


def test_a_mistake_in_the_steps_is_no_bad_picture() -> None:
    """timm's erasing wants tensors: were that taken for a damaged file, every picture would be one."""
    pytest.importorskip("timm")
    decoder = training_decoder(SPEC, {"use_timm": True, "re_prob": 1.0}, False, LIMIT)
    with pytest.raises(TypeError):
        decoder(encoded(scene(64, 64), "PNG"), 0)
