"""What the policy must never do, on simulated GPUs: lose to a fixed choice, lose a request, lose by more devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from scheduler.fleet import Layout, describe_machine, hybrid, plan_of, serial, splits
from scheduler.plan import Plan
from scheduler.roofline import roofline
from scheduler.simulate.outcome import DONE, Figures, Limits, check, figures
from scheduler.simulate.run import Options, Outage
from scheduler.simulate.simulation import simulate
from scheduler.simulate.workload import Mix, poisson

GPU = "A100"
LIMITS = Limits(2.0, 0.2)
EAGER = roofline(GPU).model_copy(update={"encode": roofline(GPU).encode.model_copy(update={"image_s": 0.01})})


def served(
    plan: Plan, rate_per_s: float, images: int = 1, count: int = 1200, outages: tuple[Outage, ...] = ()
) -> Figures:
    """What a load gets that would be too much for less."""
    chance = np.random.default_rng(5)
    workload = Mix(images=images).draw(poisson(count, rate_per_s, chance), chance)
    unlimited = plan.model_copy(update={"limits": plan.limits.model_copy(update={"max_waiting": 10**6})})
    run = simulate(unlimited, workload, EAGER, Options(max_in_flight=10**6, outages=outages))
    check(run.outcomes, workload)
    return figures(run.outcomes, LIMITS)


def placed(layout: Layout, num_gpus: int) -> Plan:
    return plan_of(describe_machine(num_gpus, GPU), layout)


@pytest.mark.parametrize("images", [1, 4])
def test_deciding_per_request_is_no_worse_than_deciding_once(images: int) -> None:
    for share in (0.8, 1.0, 1.2):
        rate = 4 * 9.5 / images * share

        adaptive = served(placed(hybrid(4), 4), rate, images)

        for layout in (serial(4), *splits(4)):
            assert adaptive.goodput_per_s >= 0.97 * served(placed(layout, 4), rate, images).goodput_per_s


def test_without_its_encoder_pool_a_server_is_no_worse_than_serial() -> None:
    """The dedicated half of the encoders dies; the decoders' own go on."""
    plan = plan_of(describe_machine(4, GPU), Layout(4, 3, True))
    alone = next(each for each in plan.encoders if each.device not in {other.device for other in plan.decoders})
    serial_plan = placed(serial(3), 3)

    for rate in (20.0, 30.0):
        bereft = served(plan, rate, outages=(Outage(alone.name, 1.0),))

        assert bereft.num_by_outcome == {"done": 1080}
        assert bereft.goodput_per_s >= 0.98 * served(serial_plan, rate).goodput_per_s


@pytest.mark.parametrize("make", [serial, hybrid], ids=["serial", "hybrid"])
def test_more_devices_never_serve_less(make: object) -> None:
    rates = [served(placed(make(count), count), 40.0).goodput_per_s for count in (1, 2, 3, 4, 6)]  # type: ignore[operator]

    for fewer, more in pairwise(rates):
        assert more >= 0.98 * fewer


def test_a_storm_of_deaths_ends_every_request_once() -> None:
    plan = placed(hybrid(4), 4)
    chance = np.random.default_rng(9)
    outages = tuple(
        Outage(name, at, at + 1.5)
        for name, at in zip(
            [*(each.name for each in plan.encoders), *(each.name for each in plan.decoders)] * 4,
            chance.uniform(1, 30, 32).tolist(),
            strict=True,
        )
    )
    workload = Mix(images=2, image_share=0.7, spread=0.5).draw(poisson(800, 25.0, chance), chance)
    hurried = replace(workload, cancel_s=np.where(chance.random(800) < 0.1, 0.7, np.inf))

    run = simulate(plan, hurried, EAGER, Options(outages=outages))

    check(run.outcomes, hurried)
    assert run.tally.num_retries > 20
    assert (run.outcomes.outcome == DONE).sum() > 500
