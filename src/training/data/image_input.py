"""What an image tower wants to see, and the step from uint8 pictures to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ImageInput:
    """The preprocessing that a model was, or will be, trained with (open_clip's `preprocess_cfg`)."""

    size: tuple[int, int] = (224, 224)
    """Height and width in pixels."""
    mean: tuple[float, float, float] = OPENAI_MEAN
    """Mean of each channel, of values in 0..1."""
    std: tuple[float, float, float] = OPENAI_STD
    """Standard deviation of each channel."""
    interpolation: Literal["bicubic", "bilinear", "random"] = "bicubic"
    """How pictures are resized."""
    resize_mode: Literal["shortest", "longest", "squash"] = "shortest"
    """What evaluation does with a picture of another shape: crop, pad or squash."""

    @classmethod
    def from_preprocess_cfg(cls, values: dict[str, Any]) -> ImageInput:
        """From open_clip's `preprocess_cfg`; what that does not say is as OpenAI's models had it."""
        size = values.get("size", 224)
        known: dict[str, Any] = {
            k: values[k] for k in ("interpolation", "resize_mode") if values.get(k) is not None
        }
        triples: dict[str, Any] = {k: tuple(values[k]) for k in ("mean", "std") if values.get(k) is not None}
        return cls(size=(size, size) if isinstance(size, int) else tuple(size), **triples, **known)


def normalise(images: Tensor, spec: ImageInput) -> Tensor:
    """Pictures as the image tower wants them: [I, 3, H, W] uint8 -> [I, 3, H, W] float32, same device.

    Equal bit for bit, on CPU, to torchvision's ToTensor and Normalize.
    """
    mean, std = _mean_and_std(spec, images.device)
    return images.float().div_(255).sub_(mean).div_(std)


@cache
def _mean_and_std(spec: ImageInput, device: torch.device) -> tuple[Tensor, Tensor]:
    """[1, 3, 1, 1] fp32 each; kept, since a copy to a GPU makes the host wait for it."""
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=device).view(1, 3, 1, 1)
        for values in (spec.mean, spec.std)
    )
    return mean, std
