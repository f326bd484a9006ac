"""Decode steps in which nothing but their length changes, reckoned at once.

B sequences whose contexts hold K tokens in the first step hold K + i * B in step i:

    step(i) = d + max(w + (K + i * B) * c, B * s)

The first steps may be bound by computing (the second term), all later ones by reading (the first).
"""

from __future__ import annotations

from math import ceil, floor, sqrt

Rates = tuple[float, float, float, float]
"""Of a decode step: its start, reading the weights, per context token, per sequence; in seconds."""


class DecodeRun:
    """`num_steps` steps of one batch."""

    __slots__ = ("_bound_s", "_context_s", "_first_s", "_growth_s", "_num_bound", "_start_s", "num_steps", "total_s")

    def __init__(self, rates: Rates, num_sequences: int, context_tokens: int, num_steps: int) -> None:
        self.num_steps = num_steps
        self._start_s, weight_s, context_s, sequence_s = rates
        self._first_s = weight_s + context_tokens * context_s  # reading, in step 0
        self._growth_s = num_sequences * context_s
        self._bound_s = num_sequences * sequence_s
        missing_s = self._bound_s - self._first_s
        self._num_bound = ceil(missing_s / self._growth_s) if missing_s > 0 and self._growth_s > 0 else 0
        self.total_s = self.seconds(num_steps)

    def seconds(self, num_steps: int) -> float:
        """What the first `num_steps` take together."""
        bound = self._num_bound if self._num_bound < num_steps else num_steps
        free = num_steps - bound
        read_s = free * self._first_s + self._growth_s * (free * (bound + num_steps - 1) / 2)
        return num_steps * self._start_s + bound * self._bound_s + read_s

    def last_s(self) -> float:
        """What its last step takes."""
        index = self.num_steps - 1
        return self._start_s + max(self._first_s + index * self._growth_s, self._bound_s)

    def cut(self, elapsed_s: float) -> float:
        """Ends the run with the step that is going on after `elapsed_s`; how long it takes then."""
        most = self.num_steps
        num_steps = min(max(self._guess(elapsed_s), 1), most)
        while num_steps > 1 and self.seconds(num_steps - 1) >= elapsed_s:
            num_steps -= 1
        seconds = self.seconds(num_steps)
        while num_steps < most and seconds < elapsed_s:
            num_steps += 1
            seconds = self.seconds(num_steps)
        self.num_steps = num_steps
        return seconds

    def _guess(self, elapsed_s: float) -> int:
        """About how many steps take so long: the root of `seconds`."""
        bound = min(self._num_bound, self.num_steps)
        bound_s = self._start_s + self._bound_s
        if bound and elapsed_s <= bound * bound_s:
            return floor(elapsed_s / bound_s) + 1 if bound_s > 0 else self.num_steps
        left_s = elapsed_s - bound * bound_s
        first_s = self._start_s + self._first_s + bound * self._growth_s
        half_s = self._growth_s / 2
        if half_s == 0:
            return bound + (floor(left_s / first_s) + 1 if first_s > 0 else self.num_steps)
        slope_s = first_s - half_s
        return bound + floor((sqrt(slope_s * slope_s + 4 * half_s * left_s) - slope_s) / (2 * half_s)) + 1
