"""What is done in rounds goes on until it is closed, whatever one round does."""

from __future__ import annotations

import threading

from python_backend.rounds import Rounds


def test_a_round_that_raises_does_not_end_the_rounds() -> None:
    numbers: list[int] = []
    is_enough = threading.Event()

    def act() -> None:
        numbers.append(len(numbers))
        if len(numbers) == 3:
            is_enough.set()
        raise ValueError("a bug")

    rounds = Rounds("watch", 0.001, act)

    assert is_enough.wait(10)
    rounds.close()


def test_closing_waits_for_the_round_that_is_under_way_and_begins_no_other() -> None:
    began, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []

    def act() -> None:
        began.set()
        assert may_end.wait(10)
        ended.append(True)

    rounds = Rounds("watch", 0.001, act)
    assert began.wait(10)
    threading.Timer(0.05, may_end.set).start()
    rounds.close(timeout_s=None)

    assert ended == [True]
