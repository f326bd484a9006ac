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
"""A split below this share of the best so far, untuned, is not tuned: tuning was never seen to give so much."""


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
    layouts: Sequence[Layout] | None = None,
    told: Callable[[str], None] | None = None,
) -> list[Result]:
    """The layouts of a machine, best first. `told` hears what is being looked at.

    Raises:
        FleetRefused, PlacementRefused: no layout fits.
    """
    found: list[Result] = []
    for layout in every_layout(topology.num_gpus) if layouts is None else layouts:
        if told is not None:
            told(layout.name)
        best = max((each.mean_per_s for each in found), default=0.0)
        result = tune(question, topology, layout, shares, seeds, best)
        if result is not None:
            found.append(result)
    if not found:
        raise PlacementRefused("no layout keeps the limits at any rate; allow more time or a smaller model")
    return sorted(found, key=lambda each: -each.mean_per_s)


def every_layout(num_gpus: int) -> list[Layout]:
    """Serial, hybrid with all encoders and with half of them, and the splits, the likelier first."""
    some = [hybrid(num_gpus, num_gpus // 2)] if num_gpus > 1 else []
    return [serial(num_gpus), hybrid(num_gpus), *some, *splits(num_gpus)] if num_gpus > 1 else [serial(num_gpus)]


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
