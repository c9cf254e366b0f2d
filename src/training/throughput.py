"""How fast a run is: FLOPs of a sample, the device's peak, and the share of time that is spent waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils.flop_counter import FlopCounterMode

from shardclip.models.dual_encoder import DualEncoder

_PEAK_BF16 = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
}
"""Dense bf16 (V100: fp16) FLOP/s by NVIDIA's data sheets; a longer name is looked for first."""


@dataclass(frozen=True)
class PairFlops:
    """FLOPs of one pair's forward pass."""

    text_token: float
    """Of the text tower, for a token of a row as long as the context: packed or not, it stands in one."""
    rest: int
    """Of the image tower and, in a captioning model, the decoder."""

    def of(self, text_tokens: float) -> float:
        """FLOPs with so many tokens in the text tower: the real ones if it is packed, else the whole context.

        Three times this is what MFU counts as a step's work: padding that is not computed is no work.
        """
        return self.rest + self.text_token * text_tokens


def forward_flops(model: DualEncoder, image_size: tuple[int, int], context_length: int) -> PairFlops | None:
    """FLOPs of one pair's forward pass, counted on a model on the meta device; None if it cannot run."""
    image = torch.empty(1, 3, *image_size, device="meta")
    text = torch.zeros(1, context_length, dtype=torch.int64, device="meta")
    rows = torch.zeros(1, dtype=torch.int64, device="meta")
    pairs = (rows, rows) if hasattr(model, "text_decoder") else None
    try:
        with torch.device("meta"):
            with FlopCounterMode(display=False) as whole:
                model(image, text, caption_pairs=pairs)
            with FlopCounterMode(display=False) as alone:
                model(text=text)
    except (NotImplementedError, RuntimeError):
        # A tower that looks at values (a mask of padding, say) has none to look at on the meta device.
        return None
    of_text = alone.get_total_flops()
    return PairFlops(of_text / context_length, whole.get_total_flops() - of_text)


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """The device's dense FLOP/s in `dtype`; None where it is not known (CPUs, fp32)."""
    if device.type != "cuda" or dtype is None:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAK_BF16.items() if key in name), None)


@dataclass
class Meter:
    """Seconds and samples since the last reading: of the whole, and of what the data made it wait."""

    samples: int = 0
    text_tokens: int = 0
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"data": 0.0, "step": 0.0})
    _last: float = field(default_factory=time.perf_counter)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Add the time inside to `what` (`data` or `step`)."""
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start

    def pause(self) -> None:
        """Leave out what came since the last step (an evaluation, say)."""
        self._last = time.perf_counter() - self.seconds["data"] - self.seconds["step"]

    def read(self, world_size: int) -> dict[str, float]:
        """Rates since the last reading, under open_clip's names, and start again; `samples` are global."""
        elapsed = max(time.perf_counter() - self._last, 1e-9)
        steps = max(self.steps, 1)
        rates = {
            "data_time": self.seconds["data"] / steps,
            "batch_time": elapsed / steps,
            "samples_per_second": self.samples / elapsed,
            "samples_per_second_per_gpu": self.samples / elapsed / world_size,
            "text_tokens_per_sample": self.text_tokens / max(self.samples, 1),
            "data_wait_share": min(1.0, self.seconds["data"] / elapsed),
        }
        self.samples = self.text_tokens = self.steps = 0
        self.seconds = {"data": 0.0, "step": 0.0}
        self._last = time.perf_counter()
        return rates


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: allocated on a GPU, resident (of this process) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
