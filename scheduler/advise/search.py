"""Every layout of a machine, tuned alike and compared over the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from scheduler.advise.goodput import Question, find_goodput
from scheduler.advise.share import Shares, guess_per_s
from scheduler.fleet import Layout, Tuning, hybrid, plan_of, serial, splits
from scheduler.placement import PlacementRefused
from scheduler.topology import Topology

CHUNKS = (512, 1024, 2048, 4096)
BATCHES = (8, 2)
COARSE = 0.04
NEAR, VERY_NEAR = 1.08, 1.03  # how far a search looks at first, from another tuning's result, and from its own
HOPELESS = 0.75
"""A layout below this share of the best so far, untuned, is not tuned: tuning was never seen to give so much."""


@dataclass(frozen=True, slots=True)
class Result:
    """A layout as well as it could be tuned."""

    layout: Layout
    tuning: Tuning
    goodput_per_s: tuple[float, ...]  # by seed
    is_tuned: bool = True

    @property
    def mean_per_s(self) -> float:
        """Over the seeds."""
        return fmean(self.goodput_per_s)


def compare(
    question: Question,
    topology: Topology,
    shares: Shares,
    seeds: Sequence[int],
    told: Callable[[str], None] | None = None,
) -> list[Result]:
    """The layouts of a machine, best first. `told` hears what is being looked at.

    Raises:
        FleetRefused, PlacementRefused: no layout fits.
    """
    found: list[Result] = []

    def look_at(layouts: Sequence[Layout]) -> None:
        for layout in layouts:
            if told is not None:
                told(layout.name)
            best = max((each.mean_per_s for each in found), default=0.0)
            result = tune(question, topology, layout, shares, seeds, best)
            if result is not None:
                found.append(result)

    count = topology.num_gpus
    look_at([serial(count), *splits(count)])
    dedicated = [each for each in found if not each.layout.is_hybrid]
    look_at(hybrids(count, max(dedicated, key=lambda each: each.mean_per_s).layout.num_encoders if dedicated else 1))
    if not found:
        raise PlacementRefused("no layout keeps the limits at any rate; allow more time or a smaller model")
    return sorted(found, key=lambda each: -each.mean_per_s)


def hybrids(num_gpus: int, num_encoders: int) -> list[Layout]:
    """Those in which all, half, one, or as many as in the best split may encode; none for one GPU."""
    counts = dict.fromkeys((num_gpus, num_gpus // 2, num_encoders, 1)) if num_gpus > 1 else ()
    return [hybrid(num_gpus, count) for count in counts]


def tune(
    question: Question,
    topology: Topology,
    layout: Layout,
    shares: Shares,
    seeds: Sequence[int],
    best_per_s: float = 0.0,
) -> Result | None:
    """A layout with the chunk and encode batch that serve it best; None if the limits cannot be kept."""
    guess = guess_per_s(shares, layout.num_encoders, layout.num_decoders, layout.is_hybrid)
    limit_ms = max(1, round(question.limits.tpot_s * 1000))
    tuning = Tuning(step_limit_ms=500)
    first = find_goodput(question, plan_of(topology, layout, tuning), guess, seeds[0], COARSE)
    if first == 0:
        return None
    if first < HOPELESS * best_per_s:
        return Result(layout, tuning, (first,), is_tuned=False)
    tried = {tuning: first}

    def attempt(candidate: Tuning) -> None:
        if candidate not in tried:
            plan = plan_of(topology, layout, candidate)
            tried[candidate] = find_goodput(question, plan, max(tried.values()), seeds[0], COARSE, NEAR)

    for chunk in CHUNKS:
        attempt(replace(tuning, step_tokens=chunk))
    attempt(replace(_best(tried), step_limit_ms=limit_ms))
    for batch in BATCHES:
        attempt(replace(_best(tried), max_batch=batch))
    chosen = _best(tried)
    plan = plan_of(topology, layout, chosen)
    guess = tried[chosen]
    return Result(layout, chosen, tuple(find_goodput(question, plan, guess, seed, step=VERY_NEAR) for seed in seeds))


def _best(tried: dict[Tuning, float]) -> Tuning:
    return max(tried, key=lambda each: tried[each])
