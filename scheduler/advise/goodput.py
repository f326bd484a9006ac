"""The highest rate at which enough requests keep their limits, found by simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from scheduler.cost import Costs
from scheduler.plan import Plan
from scheduler.simulate.outcome import Figures, Limits, figures
from scheduler.simulate.run import Options
from scheduler.simulate.simulation import simulate
from scheduler.simulate.workload import Workload, WorkloadRefused

MakeWorkload = Callable[[int, float, int], Workload]
"""Takes number of requests, rate and seed."""

WARM_UP = 0.2
LEAST_REQUESTS, MOST_REQUESTS = 300, 6000
LOWEST_PER_S, HIGHEST_PER_S = 1e-3, 1e6
UNBOUNDED = 10**9


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of every plan."""

    workload: MakeWorkload
    limits: Limits
    costs: Costs | Mapping[str, Costs] | None = None
    horizon_s: float = 30.0  # of arrivals, so that a queue that grows has the time to be seen
    max_in_flight: int | None = UNBOUNDED  # None: the plan's; unbounded: as many as the decoders hold
    tolerance: float = 0.01  # of the rate


def look(question: Question, plan: Plan, rate_per_s: float, seed: int) -> Figures:
    """The figures of a plan at a rate."""
    count = int(min(MOST_REQUESTS, max(LEAST_REQUESTS, rate_per_s * question.horizon_s)))
    options = Options(max_in_flight=question.max_in_flight)
    if question.max_in_flight == UNBOUNDED:  # nobody is refused: who waits too long misses the limit
        plan = plan.model_copy(update={"limits": plan.limits.model_copy(update={"max_waiting": UNBOUNDED})})
    run = simulate(plan, question.workload(count, rate_per_s, seed), question.costs, options)
    return figures(run.outcomes, question.limits, WARM_UP)


def find_goodput(
    question: Question,
    plan: Plan,
    guess_per_s: float,
    seed: int,
    tolerance: float | None = None,
    step: float = 1.25,
) -> float:
    """Requests per second, by bisection from a guess, which is trusted to about the factor `step`.

    0 when the limits cannot be kept at any rate.

    Raises:
        WorkloadRefused: they are kept at every rate, so that there is no highest.
    """
    tolerance = question.tolerance if tolerance is None else tolerance

    def keeps(rate_per_s: float) -> bool:
        return look(question, plan, rate_per_s, seed).attainment >= question.limits.attainment

    low = high = guess_per_s
    if keeps(low):
        while keeps(high := low * step):
            low, step = high, step * step
            if low > HIGHEST_PER_S:
                raise WorkloadRefused(
                    "the limits are kept however fast requests come; allowed: a longer trace, or less time"
                )
    else:
        while not keeps(low := high / step):
            high, step = low, step * step
            if high < LOWEST_PER_S:
                return 0.0
    while high / low > 1 + tolerance:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


__all__ = ["MakeWorkload", "Question", "find_goodput", "look"]
