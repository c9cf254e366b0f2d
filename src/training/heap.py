"""What the C library does with memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes

MAPPED_ALONE = 32 * 2**20
"""Bytes from which a block is mapped by itself, and goes back to the kernel when it is freed."""
KEPT = 128 * 2**20
"""Bytes at the heap's end that a process keeps for what it allocates next."""


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks of pictures and activations for the next ones, up to `KEPT`.

    By default the end of the heap may go back to the kernel many times a step, and touching its pages anew
    costs about half of what decoding a picture does, or 2 to 6 % of a step on the CPU. Whether it does hangs
    on which blocks happen to lie there, so that runs of equal flags differ. Does nothing under another C
    library.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, MAPPED_ALONE)
        libc.mallopt(trim_threshold, KEPT)
