"""From the bytes of a picture to uint8 pixels: open_clip's transform exactly, or a fast path for training.

A decoder's pixels are those of the picture, or of a crop; `resize` brings them to the tower's size.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from shardclip.training.data.image_input import ImageInput

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

Pixels = NDArray[np.uint8]
Decoder = Callable[[bytes | Pixels, int], Pixels]
"""(content of the image file or pixels [H, W, 3], seed) -> uint8 pixels [h, w, 3], to be resized."""

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


@contextlib.contextmanager
def undecodable(errors: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """What fails inside by one of these errors is a picture that is left out."""
    try:
        yield
    except errors as error:
        raise Undecodable("image cannot be decoded") from error


def rgb(picture: Image.Image) -> Pixels:
    """A picture's pixels [H, W, 3], whatever its mode (palette, grey, CMYK, 16 bit, alpha), as PIL converts.

    Raises:
        Undecodable: the file is damaged.
    """
    with undecodable():  # a damaged file makes Pillow raise almost anything
        return np.array(picture.convert("RGB"))


def resize(pixels: Pixels, size: tuple[int, int]) -> Tensor:
    """[h, w, 3] uint8, rows may have gaps between them -> [3, H, W] uint8, bicubic with antialiasing."""
    # torch knows packed pixels by the strides, that of the batch included: unsqueezed after the permutation
    # they would be unpacked first
    packed = torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    if pixels.shape[:2] == size:
        return packed[0]
    return interpolate(packed, size, mode="bicubic", antialias=True)[0]


def power_of_two_below(shrink: float) -> int:
    """The largest of 1, 2, 4, 8 that is not above `shrink`: a JPEG so scaled still has the crop's pixels."""
    return next(factor for factor in (8, 4, 2, 1) if factor <= max(shrink, 1))


@dataclass
class JpegFile:
    """A JPEG whose header has been read. simplejpeg (libjpeg-turbo) decodes it if installed, else Pillow."""

    content: bytes
    width: int
    height: int
    max_pixels: int

    @staticmethod
    def read(content: bytes | Pixels, max_pixels: int) -> JpegFile | None:
        """None for anything but a JPEG in grey or YCbCr.

        Raises:
            Undecodable: damaged, or of more than `max_pixels` pixels.
        """
        if not isinstance(content, bytes) or not content.startswith(b"\xff\xd8"):
            return None
        if simplejpeg is not None:
            try:
                height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
            except ValueError:
                return None
        else:
            picture = open_picture(content, max_pixels)
            (width, height), colours = picture.size, picture.mode
        if colours in ("CMYK", "YCCK"):
            return None
        if width * height > max_pixels:
            raise Undecodable("image too large")
        return JpegFile(content, width, height, max_pixels)

    def pixels(self, shrink: int) -> Pixels:
        """Pixels [ceil(h / shrink), ceil(w / shrink), 3]; `shrink` is 1, 2, 4 or 8.

        Raises:
            Undecodable: the file is damaged.
        """
        width, height = -(-self.width // shrink), -(-self.height // shrink)
        if simplejpeg is not None:
            # what Pillow forgives (a stray marker, bytes after the end) is tried again below
            with contextlib.suppress(ValueError):
                return simplejpeg.decode_jpeg(self.content, min_height=height, min_width=width)
        picture = open_picture(self.content, self.max_pixels)
        picture.draft("RGB", (self.width // shrink, self.height // shrink))
        return rgb(picture)


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
        with undecodable():
            picture.load()
        state = random.getstate(), torch.get_rng_state()
        if self._random:
            random.seed(seed)
            torch.default_generator.manual_seed(seed)
        try:
            # A line of pixels that would be resized to gigabytes, a mode that has no RGB: no other error is
            # the picture's fault.
            with undecodable((MemoryError, ValueError)):
                for step in self._steps:
                    picture = step(picture)
                return np.array(picture.convert("RGB"))
        finally:
            random.setstate(state[0])
            torch.set_rng_state(state[1])


class Fast:
    """RandomResizedCrop as open_clip trains with it, decoded at the scale that the crop needs.

    A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size by leaving out the high frequencies of its 8x8
    blocks (libjpeg's scaled DCT), which costs the less the fewer pixels come out. The crop lies on the grid
    of the scaled picture, and is resized from there with antialiasing as Pillow does it, by torch's kernel
    for uint8 (within 1 of Pillow's values, two to three times as fast). Other formats are decoded whole.
    """

    def __init__(self, spec: ImageInput, augmentation: dict[str, Any], max_pixels: int) -> None:
        self._size = spec.size
        self._scale = tuple(augmentation.get("scale", (0.9, 1.0)))
        self._ratio = tuple(augmentation.get("ratio") or (3 / 4, 4 / 3))
        self._max_pixels = max_pixels

    def __call__(self, content: bytes | Pixels, seed: int) -> Pixels:
        """Pixels [h, w, 3] of a crop, which is a function of `seed`, at the scale it was decoded at."""
        jpeg = JpegFile.read(content, self._max_pixels)
        if jpeg is not None:
            width, height = jpeg.width, jpeg.height
        else:
            picture = open_picture(content, self._max_pixels)
            width, height = picture.size
        left, top, across, down = self.crop(width, height, random.Random(seed))
        shrink = 1
        if jpeg is not None:
            shrink = power_of_two_below(min(across / self._size[1], down / self._size[0]))
            pixels = jpeg.pixels(shrink)
        else:
            pixels = rgb(picture)
        top, left, down, across = (value // shrink for value in (top, left, down, across))
        return pixels[top : top + down, left : left + across]

    def crop(self, width: int, height: int, chance: random.Random) -> tuple[int, int, int, int]:
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
