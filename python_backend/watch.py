"""The watch over all requests of a relay: clients who left, deadlines, silence."""

from __future__ import annotations

import logging
from collections.abc import Callable

from python_backend.errors import Cancelled, DeadlineExceeded, PeerGone, RelayError
from python_backend.house import House
from python_backend.rounds import Rounds
from python_backend.stream import Stream

logger = logging.getLogger(__name__)

WATCH_S = 0.02  # deadlines are kept to within this
CANCEL_POLL_S = 0.1  # asking Triton whether a client is gone costs 34 us


class Watch:
    """A thread that ends, by `end`, what should not go on."""

    def __init__(
        self, house: House, stall_s: float, clock: Callable[[], float], end: Callable[[Stream, RelayError], None]
    ) -> None:
        self._house = house
        self._stall_s = stall_s
        self._clock = clock
        self._end = end
        self._polled_s = clock()
        self._rounds = Rounds("watch", WATCH_S, self._look)

    def close(self) -> None:
        """Ends the watch."""
        self._rounds.close()

    def _look(self) -> None:
        now = self._clock()
        late = self._house.expire(now)
        serving, waiting = self._house.everybody()
        for stream in late:
            self._end(stream, too_late(stream, "waiting for a place"))
        for stream in serving:
            if stream.deadline_s is not None and now >= stream.deadline_s:
                self._end(stream, too_late(stream, "being served"))
            elif now - stream.progress_s > self._stall_s:
                self._end(stream, PeerGone(f"nothing came for {self._stall_s:g} s; retry"))
        if now - self._polled_s >= CANCEL_POLL_S:
            self._polled_s = now
            gone = [stream for stream in waiting if _is_gone(stream)]
            self._house.send_away(gone)
            gone += [stream for stream in serving if _is_gone(stream)]
            for stream in gone:
                self._end(stream, Cancelled("the client cancelled the request or went away"))


def too_late(stream: Stream, doing: str) -> DeadlineExceeded:
    """What a request whose deadline passed ends with."""
    allowed_s = stream.request.deadline_s or 0.0
    return DeadlineExceeded(f"the deadline of {allowed_s * 1000:.0f} ms passed while {doing}")


def _is_gone(stream: Stream) -> bool:
    """Whether nobody waits for a request's answer any more.

    Under the lock: asking Triton after, or while, the final word is sent crashes the server.
    """
    with stream.lock:
        if stream.is_ended:
            return False
        try:
            return stream.client.is_cancelled()
        except Exception:  # one client that cannot be asked keeps no other from being asked
            logger.exception("%s: the client could not be asked", stream.id)
            return True
