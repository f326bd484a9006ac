"""Memory for what every step reads from end to end."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import torch

LARGE_PAGE_BYTES = 1 << 21
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it
# Of glibc's mallopt(3): how much may lie free at the end, from what size on memory is mapped for itself, and heaps.
MALLOC_OPTIONS = {-1: 1 << 30, -3: 1 << 30, -8: 1}


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in large pages where the system has them, which spares a page walk for every few KiB.

    They are taken from the system here, not when they are first written: that takes up to 2.6 ms for each on a virtual
    machine, which every prompt would pay until the whole of a cache has been used.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < LARGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: of shared memory, which is the default, the system makes small pages.
    memory = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % LARGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a system that does not know it: they come when they are written
        memory.madvise(MADV_POPULATE_WRITE)
    return whole[first : first + num_bytes].view(dtype).view(shape)


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one; where that is not glibc, nothing.

    Else each step maps its intermediate results anew, and the system clears page after page: more than a tenth of the
    processor's time of prompts in steps of 2,048 tokens.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, value in MALLOC_OPTIONS.items():
            set_option(option, value)
