"""What became of each request, as columns, and the figures that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from scheduler.simulate.workload import Floats, Workload

OPEN, DONE, REFUSED, LATE, CANCELLED, FAILED = range(6)
MODES = ("", "serial", "split", "text")
_NUMBER_OF = {name: number for number, name in enumerate(MODES)}


class Outcomes:
    """One row per request of a workload."""

    NAMES: ClassVar[tuple[str, ...]] = ("open", "done", "refused", "late", "cancelled", "failed")

    def __init__(self, count: int) -> None:
        self.arrived_s = np.full(count, np.nan)
        self.first_s = np.full(count, np.nan)
        self.ended_s = np.full(count, np.nan)
        self.outcome = np.zeros(count, dtype=np.int8)
        self.mode = np.zeros(count, dtype=np.int8)
        self.num_given = np.zeros(count, dtype=np.int64)
        self.num_ends = np.zeros(count, dtype=np.int8)
        self._num_ends = self.num_ends.data  # the same memory: numpy takes 1 us to add 1 to one of its small integers

    def note_mode(self, index: int, mode: str) -> None:
        """How a request was placed, the last time that it was."""
        self.mode[index] = _NUMBER_OF[mode]

    def note_end(self, index: int, outcome: int, first_s: float, ended_s: float, num_given: int) -> None:
        """How and when a request ended; a negative `first_s` is no token at all."""
        self.outcome[index] = outcome
        if first_s >= 0:
            self.first_s[index] = first_s
        self.ended_s[index] = ended_s
        self.num_given[index] = num_given
        self._num_ends[index] += 1

    @property
    def ttft_s(self) -> Floats:
        """Time to first token of each; not a number without one."""
        result: Floats = self.first_s - self.arrived_s
        return result

    @property
    def tpot_s(self) -> Floats:
        """Mean time per token after the first of each that is done; 0 with one token, else not a number."""
        gaps = np.maximum(self.num_given - 1, 1)
        result: Floats = np.where(self.outcome == DONE, (self.ended_s - self.first_s) / gaps, np.nan)
        return result


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients are promised: time to first token, mean time per further one, and the share that must have both."""

    ttft_s: float = 5.0
    tpot_s: float = 0.2
    attainment: float = 0.9


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of one measure over requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Floats) -> Quantiles:
        """Those of the values that are numbers; all not a number when none is."""
        known = values[~np.isnan(values)]
        if len(known) == 0:
            return Quantiles(*[float("nan")] * 4)
        return Quantiles(float(known.mean()), *(float(value) for value in np.percentile(known, (50, 90, 99))))


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers, over the requests that arrived after the warm-up."""

    num_requests: int
    num_by_outcome: dict[str, int]
    duration_s: float  # from the first arrival that counts to the last end
    requests_per_s: float  # done
    tokens_per_s: float
    goodput_per_s: float  # done within the limits
    attainment: float  # share of all requests, refused and failed ones too, that are done within the limits
    ttft_s: Quantiles
    tpot_s: Quantiles
    latency_s: Quantiles


def figures(outcomes: Outcomes, limits: Limits, warm_up: float = 0.1) -> Figures:
    """The figures of a run; the first `warm_up` share of its requests does not count."""
    start = int(len(outcomes.outcome) * warm_up)
    kept = slice(start, None)
    outcome, arrived_s, ended_s = outcomes.outcome[kept], outcomes.arrived_s[kept], outcomes.ended_s[kept]
    ttft_s, tpot_s = outcomes.ttft_s[kept], outcomes.tpot_s[kept]
    is_done = outcome == DONE
    with np.errstate(invalid="ignore"):
        is_good = is_done & (ttft_s <= limits.ttft_s) & (tpot_s <= limits.tpot_s)
    begin_s = float(np.nanmin(arrived_s))
    duration_s = max(float(np.nanmax(ended_s)) - begin_s, 1e-12)
    names = Outcomes.NAMES
    return Figures(
        num_requests=len(outcome),
        num_by_outcome={
            name: int(n) for n, name in zip(np.bincount(outcome, minlength=len(names)), names, strict=True) if n
        },
        duration_s=duration_s,
        requests_per_s=float(is_done.sum()) / duration_s,
        tokens_per_s=float(outcomes.num_given[kept].sum()) / duration_s,
        goodput_per_s=float(is_good.sum()) / duration_s,
        attainment=float(is_good.mean()),
        ttft_s=Quantiles.of(ttft_s),
        tpot_s=Quantiles.of(tpot_s),
        latency_s=Quantiles.of(np.where(is_done, ended_s - arrived_s, np.nan)),
    )


def check(outcomes: Outcomes, workload: Workload) -> None:
    """Every request of the workload ended exactly once, and a finished one has its whole answer."""
    assert (outcomes.num_ends == 1).all(), "a request did not end exactly once"
    is_done = outcomes.outcome == DONE
    assert (outcomes.num_given[is_done] == workload.output_tokens[is_done]).all(), "an answer is not whole"
