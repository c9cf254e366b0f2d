"""Small shards whose pictures carry their own number: any loader can be asked which samples it gave."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shardclip.training.data.batch import Batch

SIZE = (8, 8)


def picture(number: int, size: tuple[int, int] = SIZE, format: str = "PNG") -> bytes:
    """A picture [h, w] of one colour, whose three channels are the digits of `number` in base 256."""
    digits = [number % 256, number // 256 % 256, number // 65536]
    pixels = np.broadcast_to(np.array(digits, dtype=np.uint8), (*size, 3))
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, format)
    return file.getvalue()


def number_of(image: Tensor) -> int:
    """The number that a decoded picture [3, H, W] carries."""
    return int(image[0, 0, 0]) + 256 * int(image[1, 0, 0]) + 65536 * int(image[2, 0, 0])


def numbers(batch: Batch) -> list[int]:
    """The numbers of a batch's pictures, in order."""
    return [number_of(image) for image in batch.images]


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], **options: Any) -> str:
    """A tar file of these members; its path. `options` are tarfile's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def sample(number: int, **changes: Any) -> list[tuple[str, bytes]]:
    """The members of a whole sample; `changes` replaces the content of a suffix, None removes it."""
    parts: dict[str, Any] = {
        "png": picture(number),
        "txt": f"number {number}".encode(),
        "json": json.dumps({"caption": f"number {number}", "key": f"{number:06d}"}).encode(),
    }
    parts.update(changes)
    return [(f"{number:06d}.{suffix}", content) for suffix, content in parts.items() if content is not None]


def write_shards(folder: Path, sizes: Iterable[int], first: int = 0) -> str:
    """Shards 00000.tar, 00001.tar, ... of so many samples, numbered through from `first`; the folder."""
    for shard, size in enumerate(sizes):
        members = [member for number in range(first, first + size) for member in sample(number)]
        write_tar(folder / f"{shard:05d}.tar", members)
        first += size
    return str(folder)


def tokenize(captions: list[str]) -> Tensor:
    """[T, 8] token ids: the last eight bytes of each caption."""
    tokens = torch.zeros(len(captions), 8, dtype=torch.int64)
    for row, caption in enumerate(captions):
        ids = list(caption.encode()[-8:])
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return tokens


def crowded_shards(folder: Path, samples: int, size: tuple[int, int] = (48, 64)) -> str:
    """One shard of smooth random JPEG pictures [h, w], each with a list of five captions in its .json."""
    random = np.random.default_rng(0)
    members: list[tuple[str, bytes]] = []
    for number in range(samples):
        coarse = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        captions = [f"picture {number} in words {word}" for word in range(5)]
        members += sample(
            number, png=None, jpg=file.getvalue(), json=json.dumps({"captions": captions}).encode()
        )
    write_tar(folder / "00000.tar", members)
    return str(folder)
