"""Starts a server anew when nothing less helps, but not for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from launcher.process import ServerFailed
from python_backend.rounds import Rounds

logger = logging.getLogger(__name__)

LOOK_S = 0.1
MAX_STARTS, WITHIN_S = 5, 600.0  # more starts than that in so short a time are no accident


class Guard:
    """Looks whether a server is lost, and has it started anew.

    `start` gets a condition under which it must return, and raises ServerFailed when the server stops again.
    """

    def __init__(self, is_lost: Callable[[], bool], start: Callable[[Callable[[], bool]], None]) -> None:
        self._is_lost = is_lost
        self._start = start
        self._starts_s: list[float] = []
        self.has_given_up = False
        self._rounds = Rounds("guard", LOOK_S, self._look)

    def give_up(self) -> None:
        """Starts nothing from now on and breaks off a start that is under way.

        Its thread goes on, as a server that it has started gets SIGTERM when that ends.
        """
        self.has_given_up = True

    def close(self) -> None:
        """Gives up; returns when a start that is under way was broken off."""
        self.give_up()
        self._rounds.close(timeout_s=None)

    def _look(self) -> None:
        if not self.has_given_up and self._is_lost() and not self.has_given_up:
            self._begin()

    def _begin(self) -> None:
        now_s = time.monotonic()
        self._starts_s = [each for each in self._starts_s if now_s - each < WITHIN_S]
        if len(self._starts_s) >= MAX_STARTS:
            logger.error("the server was lost %d times in %g s: given up", MAX_STARTS + 1, WITHIN_S)
            self.give_up()
            return
        self._starts_s.append(now_s)
        logger.error("the server is lost and is started anew")
        try:
            self._start(lambda: self.has_given_up)
        except ServerFailed as error:
            logger.error("the server is still lost: %s", error)
            return
        if not self.has_given_up:
            logger.warning("the server is back after %.1f s", time.monotonic() - now_s)
