"""Batches at fixed sizes, and recorded graphs that are checked before they are trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from python_backend.checkpoint import CheckpointFacts
from python_backend.transport.segment import Rows
from python_backend.vision.buckets import BucketedEncoder, Pixels, buckets_up_to, to_host
from python_backend.vision.torch_graph import make_torch_encoder

SIZE = 4


class FakeProgram:
    """Features are the pixels' first four numbers, doubled; a record can go wrong as real ones have."""

    def __init__(self, batch: int, fault: str, runs: list[tuple[str, int]]) -> None:
        self.batch = batch
        self._fault = fault
        self._runs = runs
        self._pixels = np.zeros((batch, 3, SIZE, SIZE), np.float32)
        self._features = np.zeros((batch, 1, 4), np.float32)
        self.is_closed = False

    def load(self, pixels: Pixels) -> None:
        self._pixels[: len(pixels)] = pixels

    def run(self) -> None:
        self._runs.append(("run", self.batch))
        self._features = 2 * self._pixels.reshape(self.batch, -1)[:, None, :4]

    def record(self) -> Callable[[], None]:
        if self._fault == "refused":
            raise RuntimeError("operation not permitted when stream is capturing")
        first: list[np.ndarray] = []

        def replay() -> None:
            self._runs.append(("replay", self.batch))
            features = 2 * self._pixels.reshape(self.batch, -1)[:, None, :4]
            first.append(features)
            self._features = {"stale": first[0], "late": first[-2] if len(first) > 1 else first[0]}.get(
                self._fault, features
            )

        return replay

    def rows(self, num_images: int) -> list[Rows]:
        return list(self._features[:num_images])

    def close(self) -> None:
        self.is_closed = True


def encoder(fault: str = "", uses_graphs: bool = True) -> tuple[BucketedEncoder, list[tuple[str, int]]]:
    runs: list[tuple[str, int]] = []
    made = BucketedEncoder(lambda batch: FakeProgram(batch, fault, runs), SIZE, (1, 2, 4, 8), uses_graphs)
    runs.clear()
    return made, runs


def images(number: int) -> Pixels:
    return np.random.default_rng(number).standard_normal((number, 3, SIZE, SIZE), dtype=np.float32)


@pytest.mark.parametrize(("number", "batch"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_a_batch_is_replayed_at_the_next_larger_size(number: int, batch: int) -> None:
    made, runs = encoder()

    rows = made.encode(images(number))

    assert runs == [("replay", batch)]
    np.testing.assert_array_equal(np.stack(rows), 2 * images(number).reshape(number, -1)[:, None, :4])


def test_without_graphs_every_batch_runs_plainly() -> None:
    made, runs = encoder(uses_graphs=False)

    made.encode(images(3))

    assert (made.graphs, runs) == ((), [("run", 4)])


@pytest.mark.parametrize(
    ("fault", "told"), [("stale", "are off by"), ("late", "are off by"), ("refused", "cannot be recorded as a graph")]
)
def test_a_graph_that_computes_something_else_is_not_used(
    fault: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        made, runs = encoder(fault)

    assert [record.levelname for record in caplog.records] == ["ERROR"] * 4
    assert all(told in record.getMessage() for record in caplog.records)
    np.testing.assert_array_equal(made.encode(images(2))[1], 2 * images(2).reshape(2, -1)[1:, :4])
    assert runs == [("run", 2)]


@pytest.mark.parametrize("number", [0, 9])
def test_more_than_the_largest_batch_is_refused(number: int) -> None:
    made, _ = encoder()

    with pytest.raises(ValueError, match=f"{number} images at once; allowed: 1 to 8"):
        made.encode(np.zeros((number, 3, SIZE, SIZE), np.float32))


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (64, (1, 2, 4, 8))])
def test_batch_sizes_end_with_the_largest_batch(largest: int, sizes: tuple[int, ...]) -> None:
    assert buckets_up_to(largest) == sizes


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-2)])
def test_torch_gives_the_features_of_the_checkpoint_on_a_cpu(
    facts: CheckpointFacts, dtype: str, tolerance: float
) -> None:
    import torch

    from python_backend.vision.export import _wanted

    pixels = np.random.default_rng(0).standard_normal((3, 3, 336, 336), dtype=np.float32)
    wanted = _wanted(facts, torch.from_numpy(pixels), "float32")
    made = make_torch_encoder(facts, "cpu", dtype, uses_graphs=True, max_batch=4, num_threads=1)

    found = made.encode(pixels)

    assert made.graphs == ()
    assert [str(np.asarray(rows).dtype) for rows in found] == [dtype] * 3
    error = abs(np.stack([to_host(rows) for rows in found]) - wanted).max() / abs(wanted).max()
    assert error < tolerance
    made.close()
