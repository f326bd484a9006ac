"""The cost functions are those of their formulas, travel as JSON, and follow what is observed."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cost import Costs, CostsRefused, EncodeCost, TransferCost, parse_costs
from scheduler.estimate import HIGHEST, LOWEST, RunningEstimate
from scheduler.plan import Link
from scheduler.pools import costs_of
from scheduler.roofline import CPU, peak, roofline
from tests.unit.decisions.worlds import COSTS, plan

A100, H100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.mark.parametrize(
    ("name", "prefill_ms", "steps_ms"),
    [(A100, 44.9, (6.7, 12.2, 29.5)), (H100, 14.2, (4.1, 7.4, 18.0)), (H200, 14.2, (2.8, 5.2, 12.5))],
)
def test_rooflines_give_the_published_figures(name: str, prefill_ms: float, steps_ms: tuple[float, ...]) -> None:
    costs = roofline(name)

    assert costs.prefill.seconds(640) * 1000 == pytest.approx(prefill_ms, abs=0.05)
    steps = [costs.decode.seconds(batch, batch * 700) * 1000 for batch in (1, 32, 128)]
    assert steps == pytest.approx(steps_ms, abs=0.06)
    assert costs.source == f"roofline of {name}"


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        (A100, 80),
        ("NVIDIA A100-PCIE-40GB", 40),
        ("NVIDIA H100 PCIe", 80),
        (H200, 141),
        ("NVIDIA H20", 96),
        ("NVIDIA A10", 24),
        ("NVIDIA L40S", 48),
        ("NVIDIA L4", 24),
        ("Tesla V100-SXM2-16GB", 16),
        ("NVIDIA GeForce RTX 4090", 24),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name: str, gib: int) -> None:
    known = peak(name)

    assert known is not None
    assert known.memory_gib == gib


@pytest.mark.parametrize("name", [None, "NVIDIA X9000"])
def test_an_unknown_gpu_counts_as_the_slowest(name: str | None) -> None:
    assert peak(name) is None
    assert roofline(name).decode == roofline("Tesla T4").decode


@pytest.mark.parametrize(("num_images", "seconds"), [(0, 0.0), (1, 0.011), (8, 0.018), (9, 0.029), (16, 0.036)])
def test_images_are_encoded_in_batches(num_images: int, seconds: float) -> None:
    cost = EncodeCost(batch_s=0.010, image_s=0.001, max_batch=8)

    assert cost.seconds(num_images) == pytest.approx(seconds)


def link(name: str, rate: float | None = None, path: str = "pcie", access: bool | None = None) -> Link:
    """Between two GPUs."""
    return Link(first="cuda:0", second="cuda:1", link=name, gigabytes_per_s=rate, path=path, has_peer_access=access)


@pytest.mark.parametrize(
    ("over", "image_s"),
    [
        (None, 0.0),  # one device
        (link("NV12", 300.0, "nvlink"), 4_718_592 / 240e9),  # 80 % of the theoretical rate: 20 us
        (link("PIX", 24.0), 4_718_592 / 24e9),  # effective already
        (link("NV4", path="unknown"), 4_718_592 / 56e9),  # GPU not known: the narrowest NVLinks
        (link("PHB"), 4_718_592 / 12e9),
        (link("PHB", access=False), 4_718_592 / 6e9),  # through host memory
        (link("PHB", 12.0, "staged", False), 4_718_592 / 12e9),  # the estimate has halved it
        (link("NV4", path="staged", access=False), 4_718_592 / 3e9),
        (link("unknown", path="unknown"), 4_718_592 / 6e9),
    ],
)
def test_a_copy_goes_at_the_rate_of_its_link(over: Link | None, image_s: float) -> None:
    transfer = TransferCost(setup_s=0.0, staged_setup_s=0.0)

    assert transfer.seconds(3, over) == pytest.approx(3 * image_s)
    assert transfer.seconds(0, over) == 0.0


def test_what_was_measured_of_a_link_wins() -> None:
    transfer = TransferCost(setup_s=1.0, gigabytes_per_s={"NV12": 4.718592})

    assert transfer.seconds(2, link("NV12", 300.0, "nvlink")) == pytest.approx(1.0 + 2 * 1e-3)


@pytest.mark.parametrize("costs", [COSTS, CPU, roofline(A100), roofline(None)], ids=lambda costs: costs.source)
def test_costs_are_read_back_as_they_were_written(costs: Costs) -> None:
    assert parse_costs(costs.to_json(), "costs.json") == {"*": costs}
    by_device = json.dumps({"devices": {"cuda:0": json.loads(costs.to_json())}})
    assert parse_costs(by_device, "costs.json") == {"cuda:0": costs}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"encode": {"batch_s": -1.0, "image_s": 0.1}}, "encode.batch_s: input should be greater than or equal to 0"),
        ({"encode": {"batch_s": 0.0, "image_s": 0.0}}, "encode.image_s: input should be greater than 0"),
        ({"guess": 1}, "unknown key guess"),
        ({"prefill": None}, "prefill: "),
    ],
)
def test_costs_out_of_range_are_refused_by_key(change: dict[str, object], told: str) -> None:
    text = json.dumps({**json.loads(COSTS.to_json()), **change})

    with pytest.raises(CostsRefused) as refused:
        parse_costs(text, "costs.json")
    assert str(refused.value).startswith("costs costs.json: ")
    assert told in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 5000])
def test_what_is_no_json_of_costs_is_refused(text: str) -> None:
    with pytest.raises(CostsRefused, match=r"^costs x: "):
        parse_costs(text, "x")


def test_costs_are_found_by_place_then_device_then_for_all() -> None:
    placed = plan(["cuda:0"], ["cuda:1"])

    assert costs_of(placed, {"cuda:0": CPU, "*": COSTS}) == {"cuda:0": CPU, "cuda:1": COSTS}
    assert costs_of(placed) == {"cuda:0": roofline(None), "cuda:1": roofline(None)}


def test_an_estimate_follows_a_change_within_tens_of_observations() -> None:
    estimate = RunningEstimate()
    for _ in range(60):
        estimate = estimate.updated(predicted_s=0.01 * estimate.factor, observed_s=0.03)

    assert estimate.factor == pytest.approx(3.0, rel=0.01)
    assert estimate.num_observed == 60


@given(st.lists(st.tuples(st.floats(), st.floats())))
def test_an_estimate_stays_within_its_bounds_whatever_is_observed(pairs: list[tuple[float, float]]) -> None:
    estimate = RunningEstimate()
    for predicted_s, observed_s in pairs:
        estimate = estimate.updated(predicted_s, observed_s)

    assert LOWEST <= estimate.factor <= HIGHEST
    assert math.isfinite(estimate.factor)


@pytest.mark.parametrize(("predicted_s", "observed_s"), [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_an_observation_without_meaning_changes_nothing(predicted_s: float, observed_s: float) -> None:
    assert RunningEstimate().updated(predicted_s, observed_s) == RunningEstimate()
