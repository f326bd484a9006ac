"""Memory of the decoder on a CPU: large pages, and nothing mapped anew in every step."""

from __future__ import annotations

import resource

import torch

from python_backend.decoder.memory import LARGE_PAGE_BYTES, keep_freed_memory, zeros

MIB = 1 << 20


def test_large_memory_is_zero_and_begins_with_a_large_page() -> None:
    memory = zeros((3, MIB), torch.bfloat16, torch.device("cpu"))

    assert memory.data_ptr() % LARGE_PAGE_BYTES == 0
    assert memory.is_contiguous()
    assert memory.count_nonzero() == 0


def test_what_a_step_frees_is_there_for_the_next() -> None:
    keep_freed_memory()
    torch.full((8 * MIB,), 1, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    for _ in range(20):
        torch.full((8 * MIB,), 1, dtype=torch.uint8)

    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < 8 * MIB / resource.getpagesize(), "each was mapped anew"
