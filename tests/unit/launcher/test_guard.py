"""A lost server is started anew, a few times; not while it stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from launcher.guard import LOOK_S, MAX_STARTS, Guard
from launcher.process import ServerFailed


class LostServer:
    """A server that is lost again as often as a test wants."""

    def __init__(self, num_losses: int) -> None:
        self.num_losses = num_losses
        self.num_starts = 0
        self.is_quiet = threading.Event()

    def is_lost(self) -> bool:
        if self.num_starts >= self.num_losses:
            self.is_quiet.set()
            return False
        return True

    def start(self, is_over: Callable[[], bool]) -> None:
        self.num_starts += 1


def test_a_lost_server_is_started_until_it_is_there() -> None:
    server = LostServer(3)
    guard = Guard(server.is_lost, server.start)

    assert server.is_quiet.wait(10)
    assert (server.num_starts, guard.has_given_up) == (3, False)
    guard.close()


def test_one_that_is_lost_again_and_again_is_given_up() -> None:
    server = LostServer(MAX_STARTS + 1)
    guard = Guard(server.is_lost, server.start)

    until_s = time.monotonic() + 10
    while not guard.has_given_up:
        assert time.monotonic() < until_s
    assert (server.num_starts, guard.has_given_up) == (MAX_STARTS, True)
    guard.close()


def test_a_start_that_fails_is_a_line_in_the_log_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def start(is_over: Callable[[], bool]) -> None:
        raise ServerFailed("tritonserver stopped while loading")

    guard = Guard(lambda: True, start)
    until_s = time.monotonic() + 10
    while not guard.has_given_up:
        assert time.monotonic() < until_s
    guard.close()

    told = [record.getMessage() for record in caplog.records]
    assert told.count("the server is still lost: tritonserver stopped while loading") == MAX_STARTS
    assert not any("is back" in line for line in told)
    assert not any(record.exc_info for record in caplog.records)


def test_closing_breaks_off_a_start(caplog: pytest.LogCaptureFixture) -> None:
    began, was_broken_off = threading.Event(), threading.Event()

    def start(is_over: Callable[[], bool]) -> None:
        began.set()
        while not is_over():
            pass
        was_broken_off.set()

    guard = Guard(lambda: True, start)
    assert began.wait(10)
    guard.close()

    assert was_broken_off.is_set()
    assert not any("is back" in record.getMessage() for record in caplog.records)


def test_giving_up_does_not_end_the_thread_whose_end_takes_the_server_along() -> None:
    server = LostServer(1)
    guard = Guard(server.is_lost, server.start)
    assert server.is_quiet.wait(10)

    guard.give_up()
    time.sleep(3 * LOOK_S)

    assert "guard" in [thread.name for thread in threading.enumerate()]
    guard.close()
    assert "guard" not in [thread.name for thread in threading.enumerate()]
