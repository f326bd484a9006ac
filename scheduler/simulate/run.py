"""What a simulation is told beside plan and workload, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.cost import Costs
from scheduler.plan import Plan
from scheduler.pools import place_of
from scheduler.simulate.desk import FrontCost
from scheduler.simulate.front import Log, Tally
from scheduler.simulate.outcome import Outcomes
from scheduler.simulate.workload import Workload


class SimulationRefused(ValueError):
    """What cannot be simulated; the message names it and what is allowed."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica, or every replica on a device, that dies and may come back."""

    name: str
    at_s: float
    until_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Options:
    """How a run differs from what its plan says."""

    policy: str | None = None  # None: the plan's
    max_in_flight: int | None = None  # None: the plan's limit
    outages: Sequence[Outage] = ()
    believed: Costs | Mapping[str, Costs] | None = None  # what the policy reckons with; None: the true costs
    learns: bool = False  # whether the policy corrects what it reckons with by what it sees, as the server does
    front: FrontCost | None = None  # of a server whose stages compute on its own CPUs
    stretch: float = 1.0  # how many times longer all work takes, since others use the same devices
    log: Log | None = None
    keeps_spans: bool = False
    progress: Callable[[int], None] | None = None  # told how many more requests have arrived, now and then


@dataclass(frozen=True, slots=True)
class Span:
    """A replica at work on a batch of images, or on one or more like decode steps."""

    replica: str
    began_s: float
    ended_s: float
    num_images: int = 0
    num_sequences: int = 0
    num_prompt_tokens: int = 0


@dataclass(slots=True)
class Samples:
    """What arriving requests found: a row per sample, a column per replica."""

    time_s: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    encoder_queue: list[list[int]] = field(default_factory=list)
    decoder_waiting: list[list[int]] = field(default_factory=list)
    decoder_running: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """What came of a simulation."""

    plan: Plan
    workload: Workload
    outcomes: Outcomes
    tally: Tally
    duration_s: float
    busy: dict[str, float]  # by replica: share of the duration, in work at full speed
    samples: Samples
    num_batches: dict[str, int]
    num_encoded: int
    num_cached: int
    num_steps: dict[str, int]
    num_preemptions: int
    spans: list[Span]

    @property
    def device_busy(self) -> dict[str, dict[str, float]]:
        """By device and stage."""
        found: dict[str, dict[str, float]] = {}
        for stage, side in (("encode", self.plan.encoders), ("decode", self.plan.decoders)):
            for replica in side:
                stages = found.setdefault(place_of(replica), {})
                stages[stage] = stages.get(stage, 0.0) + self.busy[replica.name]
        return found
