"""Work in front of the stages on a server whose stages compute on its CPUs: reading, relaying, streaming.

On a GPU server it hides behind the stages. On CPUs it takes their time: here it goes, piece by piece, to a CPU that
has nothing to do, or, as the kernel does it too, to any of them in turn where there is none.
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
    """CPU seconds of a request in front of the stages, in their order."""

    before_s: float = 0.0  # until it is placed
    between_s: float = 0.0  # from an encoder to a decoder
    reply_s: float = 0.0  # of its first token, to the client
    stream_s: float = 0.0  # of each further token


PIECE_S = 0.002
"""Tokens are sent in pieces of so much work, or less: what a request waits for gets in between."""

Job = tuple[float, Callable[[Any], None], Any]
"""Seconds, and what is done at their end, with what."""


class Desk:
    """One thread per CPU that works through what is in front: first what a request waits for, then tokens to send."""

    def __init__(self, agenda: Agenda, silicon: Sequence[Silicon], cost: FrontCost) -> None:
        self.cost = cost
        self._urgent: deque[Job] = deque()
        self._tokens_s = 0.0  # to be worked on
        self._clerks = [_Clerk(self, agenda, each) for each in silicon]

    def take(self, seconds: float, deed: Callable[[Any], None], what: Any = None) -> None:
        """Has `deed(what)` done after so much work, in the order of the calls."""
        self._urgent.append((seconds, deed, what))
        self._call()

    def stream(self, num_tokens: int) -> None:
        """Sends so many tokens on."""
        self._tokens_s += num_tokens * self.cost.stream_s
        self._call()

    def next(self) -> Job | None:
        """What is to be done next, which the caller does."""
        if self._urgent:
            return self._urgent.popleft()
        if self._tokens_s <= 0:
            return None
        seconds = min(self._tokens_s, PIECE_S)
        self._tokens_s -= seconds
        return seconds, _nothing, None

    def _call(self) -> None:
        """Has a clerk begin who is free: one whose CPU is, if there is one, else the one whose turn it is."""
        free = [clerk for clerk in self._clerks if not clerk.is_busy]
        if free:
            chosen = next((clerk for clerk in free if clerk.is_alone()), free[0])
            self._clerks.remove(chosen)
            self._clerks.append(chosen)
            chosen.begin()


def _nothing(_: object) -> None:
    """The end of work that nobody waits for."""


class _Clerk:
    def __init__(self, desk: Desk, agenda: Agenda, silicon: Silicon) -> None:
        self._desk = desk
        self._silicon = silicon
        self._work = Work(agenda, silicon, "front", self._done)
        self._job: Job | None = None

    @property
    def is_busy(self) -> bool:
        return self._job is not None

    def is_alone(self) -> bool:
        """Whether nobody computes here."""
        return not any(member.is_active for member in self._silicon.members)

    def begin(self) -> None:
        self._job = self._desk.next()
        if self._job is not None:
            self._work.begin(self._job[0])

    def _done(self) -> None:
        job = self._job
        self.begin()
        if job is not None:
            job[1](job[2])
