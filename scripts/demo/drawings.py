"""The drawings in the demo's shards, and how far one gets with their pixels alone."""

import json
import tarfile
from collections import Counter
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
import torchvision.transforms.v2.functional as transforms
from PIL import Image
from torch import Tensor

from shardclip.training.evaluation.scores import count_ahead

RECALLS = (1, 5, 10)


@dataclass(frozen=True)
class Drawing:
    """One sample of the shards."""

    concept: str
    """Code points, the same for all artists."""
    artist: str
    name: str
    group: str
    png: bytes

    @property
    def picture(self) -> Image.Image:
        """RGB."""
        return Image.open(BytesIO(self.png)).convert("RGB")


def read_drawings(folder: Path) -> list[Drawing]:
    """All samples of a split, in the order of its shards."""
    drawings = []
    for file in sorted(folder.glob("*.tar")):
        members: dict[str, dict[str, bytes]] = {}
        with tarfile.open(file) as tar:
            for member in tar:
                key, _, suffix = member.name.rpartition(".")
                members.setdefault(key, {})[suffix] = tar.extractfile(member).read()
        for parts in members.values():
            record = json.loads(parts["json"])
            name = parts["txt"].decode()
            drawings.append(Drawing(record["concept"], record["artist"], name, record["group"], parts["png"]))
    return drawings


def chance(drawings: list[Drawing]) -> dict[int, float]:
    """R@k of a blind guess."""
    return {k: min(1.0, k / len(drawings)) for k in RECALLS}


def majority(drawings: list[Drawing]) -> float:
    """Accuracy of always naming the largest group."""
    return Counter(drawing.group for drawing in drawings).most_common(1)[0][1] / len(drawings)


def pixel_baseline(queries: list[Drawing], candidates: list[Drawing]) -> dict[int, float]:
    """R@k of looking for the concept by nearest 8x8 thumbnail among another artist's drawings.

    Args:
        queries: drawings by one artist.
        candidates: another artist's drawings of the same concepts and maybe others.
    """
    column = {drawing.concept: index for index, drawing in enumerate(candidates)}
    found = [drawing for drawing in queries if drawing.concept in column]
    scores = -torch.cdist(_thumbnails(found), _thumbnails(candidates))
    target = torch.tensor([column[drawing.concept] for drawing in found])
    own_score = scores.gather(1, target[:, None])[:, 0]
    ranks = count_ahead(scores, own_score, target, torch.arange(len(candidates)))
    return {k: float((ranks < k).double().mean()) for k in RECALLS}


def _thumbnails(drawings: list[Drawing]) -> Tensor:
    """[n, 192] fp64: 8x8 pixels of 3 channels."""
    small = [
        transforms.resize(transforms.pil_to_tensor(drawing.picture).double(), [8, 8], antialias=True)
        for drawing in drawings
    ]
    return torch.stack(small).flatten(1)
