"""Cost functions are found again from times that follow them."""

from __future__ import annotations

import random

import pytest

from scheduler.cost import DecodeCost, EncodeCost, PrefillCost
from scheduler.fit import Geometry, Sample, fit_decode, fit_encode, fit_prefill, mean_error

GEOMETRY = Geometry(weight_bytes=1e9, kv_bytes_per_token=1e5, flop_per_token=1e9)
POINTS = [(size, size * context) for size in (1, 2, 4, 8, 16, 32) for context in (64, 1000)]


def test_encode_is_found_again() -> None:
    cost = EncodeCost(batch_s=0.003, image_s=0.002)

    found = fit_encode([Sample(size, cost.seconds(size)) for size in (1, 2, 4, 8)], 8)

    assert (found.batch_s, found.image_s, found.max_batch) == (pytest.approx(0.003), pytest.approx(0.002), 8)


def test_prefill_is_found_again() -> None:
    cost = PrefillCost(start_s=0.001, token_s=2e-5, token_squared_s=3e-9)

    found = fit_prefill([Sample(size, cost.seconds(size)) for size in (16, 64, 256, 1024, 2048)])

    assert found.start_s == pytest.approx(0.001)
    assert found.token_s == pytest.approx(2e-5)
    assert found.token_squared_s == pytest.approx(3e-9)


@pytest.mark.parametrize("bandwidth", [1e10, 3e11, 1e14])  # mostly reading, both, only computing
def test_decode_is_found_again(bandwidth: float) -> None:
    cost = DecodeCost(
        step_s=0.002,
        weight_bytes=1e9,
        kv_bytes_per_token=1e5,
        bytes_per_s=bandwidth,
        flop_per_token=1e9,
        flop_per_s=1e12,
    )
    samples = [Sample(size, cost.seconds(size, tokens), tokens) for size, tokens in POINTS]

    found = fit_decode(samples, GEOMETRY)

    assert mean_error([found.seconds(size, tokens) for size, tokens in POINTS], samples) < 0.02


def test_noise_makes_no_coefficient_negative() -> None:
    chance = random.Random(1)
    samples = [Sample(size, 0.01 * chance.uniform(0.8, 1.2), tokens) for size, tokens in POINTS]

    decode, encode = fit_decode(samples, GEOMETRY), fit_encode(samples, 32)

    assert mean_error([decode.seconds(size, tokens) for size, tokens in POINTS], samples) < 0.2
    assert encode.batch_s == pytest.approx(0.01, rel=0.2)


def test_nothing_measured_is_said_plainly() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        fit_encode([], 8)
