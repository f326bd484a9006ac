"""Encoding at a few fixed batch sizes, each one recorded once and replayed: what all GPU runtimes share.

    3 images ─▶ bucket 4: load 3 rows ─ replay (or run) ─▶ 3 rows of features; the fourth is whatever was there before

A recorded graph reads and writes fixed addresses. Wrong results from replayed graphs have been seen in the field
(features of the image before), so at the start every graph is compared with the plain computation on two different
images, and one that differs is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from python_backend.transport.segment import Rows

logger = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8)  # an encoder saturates near 6
TOLERANCE = 1e-2  # of the largest feature: kernels of one batch size may differ between two runs, in the last bits

Pixels = npt.NDArray[np.float32]


class Program(Protocol):
    """The encoder at one batch size, with memory of its own for pixels and features."""

    def load(self, pixels: Pixels) -> None:
        """Copies pixel values (images, 3, height, width) in; rows beyond keep what they had."""

    def run(self) -> None:
        """Computes the features of all rows, or begins to."""

    def record(self) -> Callable[[], None]:
        """Records what `run` does; calling what it gives does it again, faster."""

    def rows(self, num_images: int) -> list[Rows]:
        """The features of the first images, each (tokens, width). Valid until the next `run`."""

    def close(self) -> None:
        """Frees its memory."""


class BucketedEncoder:
    """An encoder that runs each batch at the next larger of its batch sizes. Used by one thread."""

    def __init__(
        self,
        make: Callable[[int], Program],
        image_size: int,
        batches: Iterable[int] = BATCHES,
        uses_graphs: bool = True,
    ) -> None:
        self._programs: dict[int, Program] = {}
        self._replays: dict[int, Callable[[], None]] = {}
        try:
            for batch in sorted(set(batches)):
                self._programs[batch] = make(batch)
        except BaseException:
            self.close()
            raise
        self._image_size = image_size
        if uses_graphs:
            for batch, program in self._programs.items():
                self._add_replay(batch, program)
        recorded = ", ".join(map(str, self._replays)) or "none"
        logger.info("encoder ready at batches of %s; graphs: %s", ", ".join(map(str, self._programs)), recorded)

    @property
    def max_batch(self) -> int:
        """See `Encoder`."""
        return max(self._programs)

    @property
    def graphs(self) -> tuple[int, ...]:
        """The batch sizes that are replayed."""
        return tuple(self._replays)

    def encode(self, pixels: Pixels) -> list[Rows]:
        """See `Encoder`."""
        batch = next((size for size in self._programs if size >= len(pixels)), None)
        if batch is None or not len(pixels):
            raise ValueError(f"{len(pixels)} images at once; allowed: 1 to {self.max_batch}")
        program = self._programs[batch]
        program.load(pixels)
        self._replays.get(batch, program.run)()
        return program.rows(len(pixels))

    def close(self) -> None:
        """See `Encoder`."""
        self._replays.clear()
        for program in self._programs.values():
            program.close()

    def _add_replay(self, batch: int, program: Program) -> None:
        """Records a batch size, and keeps the record if it computes what the program does."""
        shape = (batch, 3, self._image_size, self._image_size)
        images = [np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) for seed in (1, 2)]
        wanted = [_features(program, pixels, program.run) for pixels in images]
        try:
            replay = program.record()
        except Exception as error:  # the runtime's own kinds; encoding works without
            logger.error("batch %d cannot be recorded as a graph and runs without: %s", batch, error)
            return
        scale = max(float(abs(features).max()) for features in wanted) or 1.0
        for index in (0, 1, 0):  # and back: a replay that keeps its first or its last result is found either way
            off = float(abs(_features(program, images[index], replay) - wanted[index]).max()) / scale
            if not off <= TOLERANCE:
                logger.error(
                    "batch %d: the recorded graph's features are off by %.1e of their scale; it runs without a graph",
                    *(batch, off),
                )
                return
        self._replays[batch] = replay


def _features(program: Program, pixels: Pixels, compute: Callable[[], None]) -> npt.NDArray[np.float32]:
    """The features of a whole batch in host memory."""
    program.load(pixels)
    compute()
    return np.stack([to_host(rows) for rows in program.rows(len(pixels))])


def to_host(rows: Rows) -> npt.NDArray[np.float32]:
    """One image's features as float32 in host memory."""
    if isinstance(rows, np.ndarray):
        return rows.astype(np.float32)
    copy = np.empty(rows.shape, rows.dtype)
    rows.copy_out(copy)
    return copy.astype(np.float32)


def buckets_up_to(max_batch: int) -> tuple[int, ...]:
    """The batch sizes to prepare for batches of at most `max_batch`."""
    largest = min(max_batch, BATCHES[-1])
    return (*(batch for batch in BATCHES if batch < largest), largest)
