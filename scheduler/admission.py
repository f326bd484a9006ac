"""Who is served next: a bounded waiting room with priorities, ageing and deadlines.

Smaller priorities are more urgent. Waiting `ageing_s` seconds is worth one step of priority, so nobody waits
for ever behind a stream of urgent requests. Ageing at one rate for all keeps the order of any two requests
fixed, so the rank `priority * ageing_s + arrival` is computed once and a heap suffices.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Generic, TypeVar

Item = TypeVar("Item")

MAX_PAUSES = 64
"""Pauses between two that leave a waiting room: so many are remembered."""

MIN_SPAN_S = 1.0
"""What they must span to be believed: places become free in bunches, when a batch ends."""


@dataclass(order=True, slots=True)
class _Entry(Generic[Item]):
    rank: float
    serial: int
    item: Item = field(compare=False)
    deadline_s: float | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not wait, and when to try again."""

    text: str
    retry_after_s: float


class WaitingRoom(Generic[Item]):
    """Requests waiting for a place. Not thread-safe: its owner holds a lock.

    Times are seconds on the owner's clock. It notes how fast it empties while somebody waits, and so can say how
    long one more would.
    """

    def __init__(self, capacity: int, ageing_s: float) -> None:
        self._capacity = capacity
        self._ageing_s = ageing_s
        self._heap: list[_Entry[Item]] = []
        self._serial = 0
        self._pauses: deque[float] = deque(maxlen=MAX_PAUSES)
        self._taken_s: float | None = None  # when the last one left, if it left others behind

    def __len__(self) -> int:
        return len(self._heap)

    def has_room(self) -> bool:
        """Whether one more may wait."""
        return len(self) < self._capacity

    def enter(self, item: Item, priority: int, deadline_s: float | None, now_s: float) -> None:
        """Adds a request; the caller has asked `has_room`, or takes one out again at once."""
        heapq.heappush(self._heap, _Entry(self.rank(priority, now_s), self._serial, item, deadline_s))
        self._serial += 1

    def rank(self, priority: int, now_s: float) -> float:
        """The order of one that arrives now: smaller is served first."""
        return priority * self._ageing_s + now_s

    def take(self, now_s: float) -> Item | None:
        """The most urgent request, which leaves the room; None when nobody waits."""
        if not self._heap:
            self._taken_s = None
            return None
        if self._taken_s is not None:
            self._pauses.append(now_s - self._taken_s)
        item = heapq.heappop(self._heap).item
        self._taken_s = now_s if self._heap else None
        return item

    def pass_through(self, now_s: float) -> None:
        """What `enter` and `take` do for one that finds nobody waiting and goes on at once."""
        if self._taken_s is not None:
            self._pauses.append(now_s - self._taken_s)
            self._taken_s = None

    def wait_s(self, priority: int, now_s: float, turn_s: float = 0.0) -> float:
        """How long one that enters now will wait, at the rate of the last that left.

        While that is not known, `turn_s` is taken for the time between two that leave.
        """
        rank = self.rank(priority, now_s)
        num_ahead = sum([entry.rank <= rank for entry in self._heap])
        is_known = sum(self._pauses) >= MIN_SPAN_S
        return (num_ahead + 1) * (fmean(self._pauses) if is_known else turn_s)

    def refusal(
        self, priority: int, now_s: float, max_waiting: int, max_wait_s: float, turn_s: float = 0.0
    ) -> Refusal | None:
        """Why one more that arrives now, and finds no place free, may not wait; None if it may.

        At most `max_waiting` may, and nobody who would wait longer than `max_wait_s`; for `turn_s` see `wait_s`.
        """
        wait_s = self.wait_s(priority, now_s, turn_s)
        if len(self) >= max_waiting:
            return Refusal(f"{max_waiting} wait; no room for more", wait_s or 1.0)
        if wait_s > max_wait_s:
            text = f"{len(self)} wait; one more would for {wait_s:.1f} s, {max_wait_s:g} s are allowed"
            return Refusal(text, wait_s - max_wait_s)
        return None

    def expire(self, now_s: float) -> list[Item]:
        """The requests whose deadline has passed; they leave the room."""
        return self._remove(lambda entry: entry.deadline_s is not None and entry.deadline_s <= now_s)

    def remove(self, items: set[int]) -> list[Item]:
        """The requests whose `id()` is in `items`; they leave the room."""
        return self._remove(lambda entry: id(entry.item) in items)

    def items(self) -> list[Item]:
        """Those who wait, in no particular order."""
        return [entry.item for entry in self._heap]

    def _remove(self, is_leaving: Callable[[_Entry[Item]], bool]) -> list[Item]:
        """Those that leave; nothing of them is kept, for a request holds megabytes of images."""
        leaving = [entry for entry in self._heap if is_leaving(entry)]
        if leaving:
            self._heap = [entry for entry in self._heap if not is_leaving(entry)]
            heapq.heapify(self._heap)
        return [entry.item for entry in leaving]
