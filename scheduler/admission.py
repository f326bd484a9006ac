"""Who is served next: a bounded waiting room with priorities, ageing and deadlines.

Smaller priorities are more urgent. Waiting `ageing_s` seconds is worth one step of priority, so nobody waits
for ever behind a stream of urgent requests. Ageing at one rate for all keeps the order of any two requests
fixed, so the rank `priority * ageing_s + arrival` is computed once and a heap suffices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(order=True, slots=True)
class _Entry(Generic[Item]):
    rank: float
    serial: int
    item: Item = field(compare=False)
    deadline_s: float | None = field(compare=False)


class WaitingRoom(Generic[Item]):
    """Requests waiting for a place. Not thread-safe: its owner holds a lock.

    Times are seconds on the owner's clock.
    """

    def __init__(self, capacity: int, ageing_s: float) -> None:
        self._capacity = capacity
        self._ageing_s = ageing_s
        self._heap: list[_Entry[Item]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def has_room(self) -> bool:
        """Whether one more may wait."""
        return len(self) < self._capacity

    def enter(self, item: Item, priority: int, deadline_s: float | None, now_s: float) -> None:
        """Adds a request; the caller has asked `has_room`, or takes one out again at once."""
        rank = priority * self._ageing_s + now_s
        heapq.heappush(self._heap, _Entry(rank, self._serial, item, deadline_s))
        self._serial += 1

    def take(self) -> Item | None:
        """The most urgent request, which leaves the room; None when nobody waits."""
        return heapq.heappop(self._heap).item if self._heap else None

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
