"""A gate lets the most urgent through first, and nobody waits at it for ever."""

from __future__ import annotations

import threading

from python_backend.gate import Gate


def never() -> bool:
    return False


def test_the_most_urgent_of_those_who_wait_goes_through_next() -> None:
    gate = Gate(1)
    assert gate.enter(0.0, never)
    order: list[float] = []

    def pass_through(rank: float) -> None:
        assert gate.enter(rank, never)
        order.append(rank)
        gate.leave()

    threads = [threading.Thread(target=pass_through, args=(rank,)) for rank in (5.0, 3.0, 9.0)]
    for waiting, thread in enumerate(threads, 1):
        thread.start()
        while len(gate._waiting) < waiting:  # it stands in the queue before the next comes
            pass
    gate.leave()
    for thread in threads:
        thread.join(5)

    assert order == [3.0, 5.0, 9.0]


def test_one_whose_request_is_over_waits_no_longer_and_takes_no_place() -> None:
    gate = Gate(1)
    assert gate.enter(0.0, never)

    assert not gate.enter(1.0, lambda: True)

    gate.leave()
    assert gate.enter(2.0, never)


def test_so_many_are_inside_as_it_is_wide() -> None:
    gate = Gate(2)

    assert [gate.enter(0.0, never), gate.enter(0.0, never)] == [True, True]
    assert not gate.enter(0.0, lambda: True)
