"""Work in front of the stages on a server whose stages compute on its CPUs: reading, relaying, streaming.

On a GPU server it hides behind the stages. On CPUs it takes their time: here it goes, request by request, to the CPU
that has the least to do, and shares it with whoever computes there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.simulate.agenda import Agenda
from scheduler.simulate.silicon import Silicon, Work


@dataclass(frozen=True, slots=True)
class FrontCost:
    """CPU seconds of a request: before it is placed, and from its first token on, while it streams."""

    before_s: float = 0.0
    after_s: float = 0.0


Job = tuple[float, Callable[[Any], None], Any]
"""Seconds, and what is done at their end, with what."""


class Desk:
    """One thread per CPU that works through what is in front."""

    def __init__(self, agenda: Agenda, silicon: Sequence[Silicon], cost: FrontCost) -> None:
        self.cost = cost
        self._clerks = [_Clerk(agenda, each) for each in silicon]

    def take(self, seconds: float, deed: Callable[[Any], None], what: Any = None) -> None:
        """Has `deed(what)` done after so much work."""
        min(self._clerks, key=lambda clerk: clerk.load()).push((seconds, deed, what))


class _Clerk:
    def __init__(self, agenda: Agenda, silicon: Silicon) -> None:
        self._silicon = silicon
        self._work = Work(agenda, silicon, "front", self._done)
        self._queue: deque[Job] = deque()

    def load(self) -> tuple[int, int]:
        """What waits here, then who computes here."""
        return len(self._queue), sum(member.is_active for member in self._silicon.members)

    def push(self, job: Job) -> None:
        self._queue.append(job)
        if len(self._queue) == 1:
            self._work.begin(job[0])

    def _done(self) -> None:
        _, deed, what = self._queue.popleft()
        if self._queue:
            self._work.begin(self._queue[0][0])
        deed(what)
