"""What to run, by how much it wins, and when that would change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from scheduler.advise.goodput import MakeWorkload, Question, find_goodput
from scheduler.advise.search import COARSE, Result, compare
from scheduler.advise.share import Shares, guess_per_s, shares_of
from scheduler.cost import Costs
from scheduler.fleet import Layout, hybrid, plan_of, serial, splits
from scheduler.topology import Topology

NOTICEABLE = 0.02
"""A gain below this share is none: another seed may undo it."""

ENCODE_FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
PEAK_SHARE = 0.8
"""Of its goodput, what a server should be asked for at the mean, so that bursts find room."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The comparison, and what follows from it."""

    results: tuple[Result, ...]  # best first
    shares: Shares
    chosen: Result
    split: Result | None  # the best that dedicates GPUs to encoding

    @property
    def is_split(self) -> bool:
        """Whether to dedicate GPUs to encoding."""
        return self.chosen is self.split

    @property
    def does_splitting_pay(self) -> bool:
        """Whether the best split serves noticeably more than all that always serve whole requests on one GPU."""
        serial = [each.mean_per_s for each in self.results if each.layout.policy == "serial"]
        return self.split is not None and self.split.mean_per_s > max(serial, default=0.0) * (1 + NOTICEABLE)

    def gain_over(self, other: Result) -> float:
        """How many times the goodput of another layout."""
        return self.chosen.mean_per_s / other.mean_per_s

    def num_sure(self, other: Result) -> tuple[int, int]:
        """In how many of the seeds that both were tried with the chosen one is at least as good, and how many."""
        pairs = list(zip(self.chosen.goodput_per_s, other.goodput_per_s, strict=False))
        return sum(one >= two for one, two in pairs), len(pairs)


def advise(
    question: Question, topology: Topology, costs: Costs, seeds: Sequence[int], told: Callable[[str], None]
) -> Advice:
    """Compares every layout of a machine of equal GPUs.

    Raises:
        FleetRefused, PlacementRefused: nothing fits.
    """
    shares = shares_of(question.workload(1000, 1.0, seeds[0]), costs)
    results = compare(question, topology, shares, seeds, told=told)
    dedicated = [each for each in results if not each.layout.is_hybrid]
    shared = [each for each in results if each.layout.is_hybrid]
    split = dedicated[0] if dedicated else None
    return Advice(tuple(results), shares, choose(shared, split), split)


def choose(shared: Sequence[Result], split: Result | None) -> Result:
    """A split only for a noticeable gain; else the best hybrid unless always-serial is noticeably better.

    `shared` are best first. Hybrid before serial: it goes on when an encoder dies, and adapts when the load changes.
    """
    if not shared or (split is not None and split.mean_per_s > shared[0].mean_per_s * (1 + NOTICEABLE)):
        assert split is not None
        return split
    adaptive = [each for each in shared if each.layout.policy == "cost"]
    if adaptive and adaptive[0].mean_per_s >= shared[0].mean_per_s * (1 - NOTICEABLE):
        return adaptive[0]
    return shared[0]


@dataclass(frozen=True, slots=True)
class Variation:
    """The same machine under another load: goodput of the three ways."""

    name: str
    serial_per_s: float
    split_per_s: float
    split: Layout
    hybrid_per_s: float

    @property
    def winner(self) -> str:
        """Of deciding once: serial or split, if either is noticeably better."""
        if self.split_per_s > self.serial_per_s * (1 + NOTICEABLE):
            return "split"
        return "serial" if self.serial_per_s > self.split_per_s * (1 + NOTICEABLE) else "either"


def vary_encode(question: Question, topology: Topology, costs: Costs, told: Callable[[str], None]) -> list[Variation]:
    """With encodes so many times as dear, as with a heavier encoder or one without graphs."""
    found = []
    for factor in ENCODE_FACTORS:
        encode = costs.encode.model_copy(
            update={"batch_s": costs.encode.batch_s * factor, "image_s": costs.encode.image_s * factor}
        )
        dearer = costs.model_copy(update={"encode": encode})
        name = f"encode x {factor:g} ({encode.seconds(1) * 1000:.3g} ms)"
        told(name)
        found.append(vary(replace(question, costs=dearer), topology, dearer, name))
    return found


def vary_images(
    question: Question,
    topology: Topology,
    costs: Costs,
    by_images: Sequence[tuple[int, MakeWorkload]],
    told: Callable[[str], None],
) -> list[Variation]:
    """With so many images in a request."""
    found = []
    for images, make in by_images:
        name = f"{images} image{'s' if images > 1 else ''}"
        told(name)
        found.append(vary(replace(question, workload=make), topology, costs, name))
    return found


def vary(question: Question, topology: Topology, costs: Costs, name: str) -> Variation:
    """One seed and no tuning: enough to see which way it leans."""
    shares = shares_of(question.workload(1000, 1.0, 1), costs)

    def goodput(layout: Layout) -> float:
        guess = guess_per_s(shares, layout.num_encoders, layout.num_decoders, layout.is_hybrid)
        return find_goodput(question, plan_of(topology, layout), guess, 1, COARSE)

    count = topology.num_gpus
    likely = max(splits(count), key=lambda each: guess_per_s(shares, each.num_encoders, each.num_decoders, False))
    adaptive = max(goodput(hybrid(count, encoders)) for encoders in dict.fromkeys((count, likely.num_encoders)))
    return Variation(name, goodput(serial(count)), goodput(likely), likely, adaptive)


def num_servers(goodput_per_s: float, target_per_s: float) -> int:
    """Servers for a target load, each asked for at most `PEAK_SHARE` of its goodput."""
    return max(1, ceil(target_per_s / (goodput_per_s * PEAK_SHARE)))
