from __future__ import annotations

import random

import pytest

from client.errors import Overloaded, Unavailable
from client.request import request_from
from client.retry import Attempts, pause_s


class NoChance(random.Random):
    """Adds nothing to a pause."""

    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("attempt", "hint_s", "pause"),
    [(0, None, 0.25), (3, None, 2.0), (0, 4.0, 4.0), (5, 4.0, 8.0), (5000, None, 30.0), (0, 60.0, 60.0)],
)
def test_pauses_double_up_to_a_bound_and_are_never_shorter_than_the_hint(
    attempt: int, hint_s: float | None, pause: float
) -> None:
    assert pause_s(attempt, hint_s, NoChance()) == pause


def test_a_pause_is_lengthened_by_chance_up_to_a_quarter() -> None:
    pauses = [pause_s(2, None, random.Random(seed)) for seed in range(100)]

    assert 1.0 <= min(pauses) < max(pauses) <= 1.25


def test_no_more_tries_than_asked_for() -> None:
    attempts = Attempts(request_from("What?", None, []), 2, lambda: 0.0, NoChance())
    error = Unavailable("a stage died")

    assert [attempts.pause_after(error), attempts.pause_after(error)] == [0.25, 0.5]
    with pytest.raises(Unavailable, match="a stage died"):
        attempts.pause_after(error)


def test_a_retry_carries_what_is_left_of_the_deadline() -> None:
    now = [100.0]
    attempts = Attempts(request_from("What?", None, [], deadline_s=2.0), 5, lambda: now[0], NoChance())

    first = attempts.next_request()
    now[0] = 101.5
    second = attempts.next_request()

    assert (first.deadline_s, second.deadline_s) == (2.0, 0.5)


def test_no_retry_when_the_deadline_would_pass_during_the_pause() -> None:
    attempts = Attempts(request_from("What?", None, [], deadline_s=2.0), 5, lambda: 0.0, NoChance())
    attempts.next_request()

    with pytest.raises(Overloaded):
        attempts.pause_after(Overloaded("full; retry after 2 s", 2.0))
