"""Memory for what every step reads from end to end."""

from __future__ import annotations

import math
import mmap

import torch

LARGE_PAGE_BYTES = 1 << 21


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in large pages where the system has them, which spares a page walk for every few KiB."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < LARGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: of shared memory, which is the default, the system makes small pages.
    memory = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % LARGE_PAGE_BYTES
    return whole[first : first + num_bytes].view(dtype).view(shape)
