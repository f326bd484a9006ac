"""What happens next: events in the order of their time, and of their entry at equal times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Deed = Callable[[Any], None]


class Agenda:
    """Events to come, and the time of the one that is happening."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Deed, Any]] = []
        self._serial = 0

    def at(self, time_s: float, deed: Deed, what: Any = None) -> None:
        """Has `deed(what)` done at a time, which must not have passed."""
        self._serial = serial = self._serial + 1
        heappush(self._heap, (time_s, serial, deed, what))

    def next_s(self) -> float | None:
        """The time of the next event; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Lets the next event happen. There must be one."""
        self.now_s, _, deed, what = heappop(self._heap)
        deed(what)

    def run_until(self, time_s: float) -> None:
        """Lets everything up to and at that time happen, and sets the clock to it."""
        heap = self._heap
        while heap and heap[0][0] <= time_s:
            self.now_s, _, deed, what = heappop(heap)
            deed(what)
        self.now_s = time_s
