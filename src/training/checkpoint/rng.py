"""The random states of one process, as tensors."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Tensor]:
    """States of torch (CPU and current accelerator), `random` and NumPy: 1-D uint8 or int64 tensors."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached_gauss = np.random.get_state()  # type: ignore[misc]
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached_gauss], dtype=torch.float64),
    }
    if torch.cuda.is_initialized():  # a run on the CPU leaves the GPUs of its machine alone
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Put back what `rng_state` returned; the accelerator's part is left out where there is none."""
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, np.uint32), position, has_gauss, state["numpy_gauss"].item())
    )
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
