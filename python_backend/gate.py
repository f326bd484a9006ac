"""A door of limited width: those of the lowest rank go through first."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

LOOK_S = 0.05  # how soon one who waits sees that its wait is over for another reason


class Gate:
    """Lets `width` callers be inside at a time. Any thread may call it.

    Triton's own queue in front of an encoder knows no priority for calls from another model, so what is more than
    an encoder has use for waits here, in order of rank (smaller is more urgent), and not there.
    """

    def __init__(self, width: int) -> None:
        self._lock = threading.Lock()
        self._num_free = width
        self._waiting: list[tuple[float, int, threading.Event]] = []
        self._serials = itertools.count()

    def enter(self, rank: float, is_over: Callable[[], bool]) -> bool:
        """Blocks until the caller is inside, True, or until `is_over` says that it need not be, False."""
        with self._lock:
            if self._num_free > 0:
                self._num_free -= 1
                return True
            place = (rank, next(self._serials), threading.Event())
            heapq.heappush(self._waiting, place)
        while not place[2].wait(LOOK_S):
            if is_over():
                return self._give_up(place)
        return True

    def leave(self) -> None:
        """Makes room for the next."""
        with self._lock:
            if self._waiting:
                heapq.heappop(self._waiting)[2].set()
            else:
                self._num_free += 1

    def _give_up(self, place: tuple[float, int, threading.Event]) -> bool:
        """Takes the caller out of the queue; True if it was let in at this very moment."""
        with self._lock:
            if place[2].is_set():
                return True
            self._waiting.remove(place)
            heapq.heapify(self._waiting)
            return False
