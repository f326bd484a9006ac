"""Cost functions from measured times: the least squares of `scheduler.cost`'s formulas, no coefficient below zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.cost import DecodeCost, EncodeCost, PrefillCost

SMALLEST = 1e-12
"""Where a coefficient must be above zero and the times say nothing of it: a picosecond."""

MAX_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured point: `size` and `tokens` as the formula has them, and the seconds it took.

    encode: images; prefill: prompt tokens; decode: sequences, and context tokens of all together.
    """

    size: float
    seconds: float
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a decoder reads and computes, from its configuration."""

    weight_bytes: float
    kv_bytes_per_token: float
    flop_per_token: float


def fit_encode(samples: Sequence[Sample], max_batch: int) -> EncodeCost:
    """e0 and e1 of encode(b) = e0 + e1 * b; sizes must not exceed `max_batch`."""
    start, rate = _solve([[1.0, each.size] for each in samples], samples)
    return EncodeCost(batch_s=start, image_s=max(rate, SMALLEST), max_batch=max_batch)


def fit_prefill(samples: Sequence[Sample]) -> PrefillCost:
    """p0, p1, p2 of prefill(T) = p0 + p1 * T + p2 * T ** 2."""
    start, rate, squared = _solve([[1.0, each.size, each.size**2] for each in samples], samples)
    return PrefillCost(start_s=start, token_s=max(rate, SMALLEST), token_squared_s=squared)


def fit_decode(samples: Sequence[Sample], geometry: Geometry) -> DecodeCost:
    """d0, bandwidth and flops of decode(B, K) = d0 + max((W + K * kv) / bandwidth, B * flop / flops).

    Which of the two counts at a point depends on what is to be found, so points and coefficients are settled in
    turns, from several beginnings; the best end wins.
    """
    reads = [geometry.weight_bytes + each.tokens * geometry.kv_bytes_per_token for each in samples]
    works = [each.size * geometry.flop_per_token for each in samples]
    by_size = sorted(range(len(samples)), key=lambda index: samples[index].size)
    best: tuple[float, tuple[float, float, float]] | None = None
    for num_reading in range(len(samples) + 1):  # the smallest batches first: those read more than they compute
        is_reading = [False] * len(samples)
        for index in by_size[:num_reading]:
            is_reading[index] = True
        found = _settle(samples, reads, works, is_reading)
        error = _error([found[0] + max(found[1] * r, found[2] * w) for r, w in zip(reads, works, strict=True)], samples)
        if best is None or error < best[0]:
            best = (error, found)
    assert best is not None
    step_s, read_s, work_s = best[1]
    return DecodeCost(
        step_s=step_s,
        weight_bytes=geometry.weight_bytes,
        kv_bytes_per_token=geometry.kv_bytes_per_token,
        bytes_per_s=1 / max(read_s, SMALLEST / geometry.weight_bytes),
        flop_per_token=geometry.flop_per_token,
        flop_per_s=1 / max(work_s, SMALLEST / geometry.flop_per_token),
    )


def mean_error(predicted: Sequence[float], samples: Sequence[Sample]) -> float:
    """The mean of |predicted - measured| / measured: 0.05 is five per cent."""
    return fmean(abs(value / each.seconds - 1) for value, each in zip(predicted, samples, strict=True))


def _settle(
    samples: Sequence[Sample], reads: list[float], works: list[float], is_reading: list[bool]
) -> tuple[float, float, float]:
    found = (0.0, 0.0, 0.0)
    for _ in range(MAX_ROUNDS):
        points = zip(reads, works, is_reading, strict=True)
        rows = [[1.0, read, 0.0] if reading else [1.0, 0.0, work] for read, work, reading in points]
        step_s, read_s, work_s = _solve(rows, samples)
        found = (step_s, read_s, work_s)
        settled = [read_s * r >= work_s * w for r, w in zip(reads, works, strict=True)]
        if settled == is_reading:
            break
        is_reading = settled
    return found


def _error(predicted: Sequence[float], samples: Sequence[Sample]) -> float:
    return sum(((value - each.seconds) / each.seconds) ** 2 for value, each in zip(predicted, samples, strict=True))


def _solve(rows: list[list[float]], samples: Sequence[Sample]) -> list[float]:
    """Coefficients, none below zero, of the least sum of squared relative errors.

    The active set by trial: with three unknowns at most there are eight sets of those that may be above zero.
    """
    if not samples:
        raise ValueError("nothing was measured: no samples to fit")
    seconds = np.array([each.seconds for each in samples])
    matrix: npt.NDArray[Any] = np.array(rows) / seconds[:, None]
    best: tuple[float, list[float]] | None = None
    for mask in range(1, 1 << matrix.shape[1]):
        chosen = [column for column in range(matrix.shape[1]) if mask >> column & 1]
        scale = np.abs(matrix[:, chosen]).max(axis=0)
        scale[scale == 0] = 1.0
        solution = np.linalg.lstsq(matrix[:, chosen] / scale, np.ones(len(samples)), rcond=None)[0] / scale
        if (solution < 0).any():
            continue
        error = float(((matrix[:, chosen] @ solution - 1) ** 2).sum())
        if best is None or error < best[0] - 1e-15:
            coefficients = [0.0] * matrix.shape[1]
            for column, value in zip(chosen, solution, strict=True):
                coefficients[column] = float(value)
            best = (error, coefficients)
    assert best is not None  # times are above zero, so a constant alone is always possible
    return best[1]
