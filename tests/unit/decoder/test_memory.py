"""Memory of the decoder on a CPU: large pages, and nothing mapped anew in every step."""

from __future__ import annotations

import resource

import torch

from python_backend.decoder.memory import LARGE_PAGE_BYTES, keep_freed_memory, zeros

MIB = 1 << 20
STEP_BYTES = 48 * MIB


def test_large_memory_is_zero_and_begins_with_a_large_page() -> None:
    memory = zeros((3, MIB), torch.bfloat16, torch.device("cpu"))

    assert memory.data_ptr() % LARGE_PAGE_BYTES == 0
    assert memory.is_contiguous()
    assert memory.count_nonzero() == 0


def test_large_memory_is_there_before_it_is_written() -> None:
    memory = zeros((64 * MIB,), torch.uint8, torch.device("cpu"))
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    memory.fill_(1)

    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 16, "its pages come one by one"


def test_what_a_step_frees_is_there_for_the_next() -> None:
    keep_freed_memory()
    take_and_free()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    for _ in range(10):
        take_and_free()

    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < STEP_BYTES / resource.getpagesize(), "each was mapped anew"


def take_and_free() -> None:
    """What a step takes: several results that are there at the same time."""
    results = [torch.full((STEP_BYTES // 4,), 1, dtype=torch.uint8) for _ in range(4)]
    del results
