"""A model, a tokenizer and data small enough to evaluate many times over."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from shardclip.models.dual_encoder import DualEncoder
from shardclip.models.factory import ModelSpec, build, build_meta
from shardclip.training import distributed
from shardclip.training.data.image_input import ImageInput
from shardclip.training.parallel import Engine, ParallelConfig, parallelize

SIZE = 16
IMAGE_INPUT = ImageInput(size=(SIZE, SIZE))
SPEC = ModelSpec(
    name="small",
    model_cfg={
        "embed_dim": 16,
        "vision_cfg": {"image_size": SIZE, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
    },
    preprocess_cfg={"size": SIZE},
)
PAIR_SHARDS = (5, 7, 2, 7)
LABEL_SHARDS = (5, 7, 1)
CLASSES = ("cat", "dog", "bird", "fish", "cat")
TEMPLATES = ("a {c}", "one {c}", "{c}")


def tokenize(texts: list[str]) -> Tensor:
    """Bytes as token ids; the highest id ends the text, as open_clip's towers expect."""
    ids = torch.zeros(len(texts), 12, dtype=torch.int64)
    for row, text in enumerate(texts):
        values = [1 + byte % 61 for byte in text.encode()[:11]]
        ids[row, : len(values) + 1] = torch.tensor([*values, 63])
    return ids


def model() -> DualEncoder:
    """The model with its starting weights, wider apart than training starts from: few near ties."""
    plain = build(SPEC, seed=3)
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return plain


def engine(kind: str, **flags: Any) -> Engine:
    """The model as `kind` lays it over the processes."""
    processes = distributed.current()
    config = ParallelConfig(distributed_engine=kind, precision="fp32", **flags)
    source = model() if processes.rank == 0 else None
    return parallelize(build_meta(SPEC), config, processes, source=source, blank_text=tokenize([""]))


class AsOpenClip(nn.Module):
    """The plain model with the one method that open_clip's classifier builder calls."""

    def __init__(self, plain: DualEncoder) -> None:
        super().__init__()
        self.plain = plain.eval()

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Features [T, D]."""
        assert normalize
        return self.plain(text=text).text_features


def picture(number: int) -> np.ndarray:
    """[SIZE, SIZE, 3] uint8, another one for every number."""
    generator = np.random.default_rng(number)
    coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return coarse.repeat(SIZE // 4, axis=0).repeat(SIZE // 4, axis=1)


def write_pairs(folder: Path, repeated: bool) -> None:
    """21 pairs in uneven shards; `repeated`: a third of the captions and pictures occur more than once."""
    captions = [f"{'abcdefghijklmnopqrstu'[number]}{number * 37 % 21} thing" for number in range(21)]
    pictures = list(range(21))
    if repeated:
        captions[3::3] = captions[:6]
        pictures[4::4] = pictures[:5]
    _write(folder, PAIR_SHARDS, [(pictures[n], "txt", captions[n]) for n in range(21)])


def write_labelled(folder: Path) -> list[int]:
    """13 labelled pictures in CLIP_benchmark's layout; returns the labels."""
    labels = [(number * 7) % 4 for number in range(13)]
    _write(folder / "test", LABEL_SHARDS, [(100 + n, "cls", str(label)) for n, label in enumerate(labels)])
    (folder / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    return labels


def _write(folder: Path, shards: tuple[int, ...], samples: list[tuple[int, str, str]]) -> None:
    folder.mkdir(parents=True)
    numbers = iter(range(len(samples)))
    for shard, count in enumerate(shards):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for _ in range(count):
                number = next(numbers)
                content, suffix, text = samples[number]
                png = io.BytesIO()
                Image.fromarray(picture(content)).save(png, "png")
                for ending, data in (("png", png.getvalue()), (suffix, text.encode())):
                    member = tarfile.TarInfo(f"{number:04d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
