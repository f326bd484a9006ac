"""When a refused request is sent again, and what is left of its deadline by then."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from client.errors import Overloaded, RegionUnknown, Unavailable
from client.request import Request

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
JITTER = 0.25  # up to this part is added, so that refused clients do not come back all at once


def pause_s(attempt: int, hint_s: float | None, chance: random.Random) -> float:
    """The pause after failed attempt number `attempt` (from 0): doubling, never shorter than the hint."""
    doubling_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt, 30))
    return max(doubling_s, hint_s or 0.0) * (1.0 + JITTER * chance.random())


@dataclass(slots=True)
class Attempts:
    """The tries of one request; owned by its stream, which sends and sleeps.

    `deadline_at` is on `clock`, set when the first try is sent.
    """

    request: Request
    retries: int
    clock: Callable[[], float]
    chance: random.Random
    num_failed: int = 0
    deadline_at: float | None = None
    was_told_again: bool = False  # the server, of shared memory

    def next_request(self) -> Request:
        """What to send now: the request with what is left of its deadline."""
        if self.request.deadline_s is None:
            return self.request
        if self.deadline_at is None:
            self.deadline_at = self.clock() + self.request.deadline_s
        return self.request.with_deadline(self.deadline_at - self.clock())

    def pause_after(self, error: Unavailable) -> float:
        """Seconds to wait before the next try.

        Raises:
            Unavailable: `error` itself, when no try is left or the deadline would pass during the pause.
        """
        if isinstance(error, RegionUnknown) and not self.was_told_again:
            self.was_told_again = True
            return 0.0
        if self.num_failed >= self.retries:
            raise error
        hint_s = error.retry_after_s if isinstance(error, Overloaded) else None
        pause = pause_s(self.num_failed, hint_s, self.chance)
        self.num_failed += 1
        if self.deadline_at is not None and self.clock() + pause >= self.deadline_at:
            raise error
        return pause
