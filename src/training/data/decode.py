"""From the bytes of a picture to uint8 pixels: open_clip's transform exactly, or a fast path for training."""

from __future__ import annotations

import io
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from shardclip.training.data.image_input import ImageInput

Pixels = NDArray[np.uint8]
Decoder = Callable[[bytes | Pixels, int], Pixels]
"""(content of the image file or pixels [H, W, 3], seed) -> pixels [H, W, 3] of the tower's size."""

SPATIAL = {"scale", "ratio"}
"""Augmentation settings that the fast path knows."""


class Undecodable(Exception):
    """A picture that is left out; the message is the reason that is counted."""


def open_picture(content: bytes | Pixels, max_pixels: int) -> Image.Image:
    """The picture, its header read and its size checked, its pixels not decoded yet.

    Raises:
        Undecodable: not a picture, or one of more than `max_pixels` pixels.
    """
    if isinstance(content, np.ndarray):
        return Image.fromarray(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(content))
    except Image.DecompressionBombError as error:
        raise Undecodable("image too large") from error
    except Exception as error:
        raise Undecodable("not an image") from error
    if picture.width * picture.height > max_pixels:
        raise Undecodable("image too large")
    return picture


class Exact:
    """open_clip's own transform up to, not including, ToTensor and Normalize."""

    def __init__(self, spec: ImageInput, train: bool, augmentation: dict[str, Any], max_pixels: int) -> None:
        from open_clip.transform import image_transform

        transform = image_transform(
            spec.size if spec.size[0] != spec.size[1] else spec.size[0],
            is_train=train,
            mean=spec.mean,
            std=spec.std,
            resize_mode=spec.resize_mode,
            interpolation=spec.interpolation,
            aug_cfg=augmentation,
        )
        to_pixels = {"MaybeToTensor", "ToTensor", "Normalize"}
        self._steps = [step for step in transform.transforms if type(step).__name__ not in to_pixels]
        self._random = train
        self._max_pixels = max_pixels

    def __call__(self, content: bytes | Pixels, seed: int) -> Pixels:
        """Pixels [H, W, 3] of the tower's size; every random choice is a function of `seed`."""
        picture = open_picture(content, self._max_pixels)
        state = random.getstate(), torch.get_rng_state()
        if self._random:
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
        try:
            for step in self._steps:
                picture = step(picture)
            return np.asarray(picture.convert("RGB"))
        except Exception as error:
            raise Undecodable("image cannot be decoded") from error
        finally:
            random.setstate(state[0])
            torch.set_rng_state(state[1])


class Fast:
    """RandomResizedCrop as open_clip trains with it, from a JPEG decoded no larger than the crop needs.

    A JPEG of 8x8 blocks can be decoded at 1/2, 1/4 or 1/8 of its size by leaving out high frequencies
    (libjpeg's scaled DCT), which costs about as much less as the pixels are fewer; the crop is resized from
    there. Other formats are decoded whole.
    """

    def __init__(self, spec: ImageInput, augmentation: dict[str, Any], max_pixels: int) -> None:
        self._height, self._width = spec.size
        self._scale = tuple(augmentation.get("scale", (0.9, 1.0)))
        self._ratio = tuple(augmentation.get("ratio") or (3 / 4, 4 / 3))
        self._filter = Image.Resampling.BICUBIC
        self._max_pixels = max_pixels

    def __call__(self, content: bytes | Pixels, seed: int) -> Pixels:
        """Pixels [H, W, 3] of the tower's size; the crop is a function of `seed`."""
        picture = open_picture(content, self._max_pixels)
        left, top, width, height = self._crop(picture.width, picture.height, random.Random(seed))
        full = picture.size
        try:
            if picture.format == "JPEG":
                shrink = min(width / self._width, height / self._height)
                picture.draft("RGB", (math.ceil(full[0] / shrink), math.ceil(full[1] / shrink)))
            across, down = picture.width / full[0], picture.height / full[1]
            if picture.mode != "RGB":
                picture = picture.convert("RGB")
            box = (left * across, top * down, (left + width) * across, (top + height) * down)
            resized = picture.resize((self._width, self._height), self._filter, box)
        except Exception as error:
            raise Undecodable("image cannot be decoded") from error
        return np.asarray(resized)

    def _crop(self, width: int, height: int, chance: random.Random) -> tuple[int, int, int, int]:
        """Left, top, width and height of a random crop, by torchvision's rule for RandomResizedCrop."""
        for _ in range(10):
            area = width * height * chance.uniform(*self._scale)
            ratio = math.exp(chance.uniform(math.log(self._ratio[0]), math.log(self._ratio[1])))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                return chance.randint(0, width - across), chance.randint(0, height - down), across, down
        across, down = width, height
        if width / height < self._ratio[0]:
            down = round(width / self._ratio[0])
        elif width / height > self._ratio[1]:
            across = round(height * self._ratio[1])
        return (width - across) // 2, (height - down) // 2, across, down


def training_decoder(spec: ImageInput, augmentation: dict[str, Any], exact: bool, max_pixels: int) -> Decoder:
    """The decoder of the training data; augmentations beyond the crop take open_clip's own transform."""
    if exact or set(augmentation) - SPATIAL:
        return Exact(spec, True, augmentation, max_pixels)
    return Fast(spec, augmentation, max_pixels)


def evaluation_decoder(spec: ImageInput, max_pixels: int) -> Decoder:
    """The decoder of evaluation: open_clip's transform for inference."""
    return Exact(spec, False, {}, max_pixels)
