"""What is passed from producer to consumer, the same in every process: embeddings, ways, checksums."""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from python_backend.transport.handle import fingerprint_of

SHAPE: Final = (576, 4096)  # patches and width of LLaVA-1.5-7B, arXiv:2310.03744
EMBEDDING_BYTES: Final = SHAPE[0] * SHAPE[1] * 2
NUM_SLOTS: Final = 64  # of the store, as in deploy/profiles/cpu.toml
WAYS: Final = ("tensor", "handle")
WHOLE: Final = -1  # instead of a row: checksum of everything
FINGERPRINT: Final = fingerprint_of("benchmark")


class Column(IntEnum):
    """What the last dimension of the `records` of the chain model holds; times in nanoseconds.

        chain     ├──────── producer hop ────────┼──────── consumer hop ────────┤
        model          ├─ producer work ─┤              ├─ consumer work ─┤

    Work is what must be done however embeddings are passed: the encoder writes its result once, the decoder
    takes a copy that outlives the request. All else is passing.
    """

    PRODUCER_HOP = 0
    CONSUMER_HOP = 1
    PRODUCER_WORK = 2
    CONSUMER_WORK = 3
    CHECKSUM = 4


def features() -> npt.NDArray[np.float16]:
    """What the stand-in for an encoder computed, of `SHAPE`: the same in every process."""
    random = np.random.default_rng(20240229)
    return random.standard_normal(SHAPE, dtype=np.float32).astype(np.float16)


def write(source: npt.NDArray[np.float16], index: int, target: npt.NDArray[Any]) -> int:
    """Writes embedding number `index` into `target`, and says how many nanoseconds that took.

    It is the source, except that each row begins with the index: so no two embeddings are alike.
    """
    began = time.perf_counter_ns()
    np.copyto(target, source)
    target.view(np.int64)[:, 0] = index
    return time.perf_counter_ns() - began


def take(source: npt.NDArray[np.generic], target: npt.NDArray[np.float16]) -> int:
    """Copies an embedding, and says how many nanoseconds that took."""
    began = time.perf_counter_ns()
    np.copyto(target, source)
    return time.perf_counter_ns() - began


def checksum(embedding: npt.NDArray[np.float16], row: int) -> int:
    """A sum over the bits of one row; for `WHOLE` over all bits, weighted by their place."""
    words = embedding.view(np.uint64)
    if row != WHOLE:
        return int(words[row].sum(dtype=np.uint64) >> np.uint64(1))
    flat = words.reshape(-1)
    return int((flat * np.arange(1, flat.size + 1, dtype=np.uint64)).sum(dtype=np.uint64) >> np.uint64(1))
