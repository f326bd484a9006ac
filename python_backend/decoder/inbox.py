"""Where any thread leaves word for the engine thread: new sequences, cancels, the wish to close."""

from __future__ import annotations

import threading

from python_backend.decoder.sequence import Sequence
from python_backend.errors import InvalidRequest, Overloaded, PeerGone


class Inbox:
    """The live requests by their ids, and those of them that the engine thread has not seen yet. Has its own lock."""

    def __init__(self, max_live: int) -> None:
        self._max_live = max_live
        self._changed = threading.Condition()
        self._arrived: list[Sequence] = []
        self._live: dict[str, Sequence] = {}
        self._is_closing = False

    def put(self, sequence: Sequence) -> None:
        """Add a new request.

        Raises:
            PeerGone: the inbox is closed.
            InvalidRequest: its id is in use.
            Overloaded: `max_live` requests have not ended yet.
        """
        request_id = sequence.request.request_id
        with self._changed:
            if self._is_closing:
                raise PeerGone("the decoder is closing")
            if request_id in self._live:
                raise InvalidRequest(f"request id {request_id!r} is in use")
            if len(self._live) >= self._max_live:
                raise Overloaded(f"{len(self._live)} requests run on the decoder or wait, {self._max_live} may")
            self._live[request_id] = sequence
            self._arrived.append(sequence)
            self._changed.notify()

    def cancel(self, request_id: str) -> bool:
        """Mark a live request as cancelled; False when there is none of that id."""
        with self._changed:
            sequence = self._live.get(request_id)
            if sequence is None:
                return False
            sequence.is_cancelled = True
            return True

    def close(self) -> None:
        """Let nothing in any more, and wake the engine thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    # For the engine thread.

    def wait(self) -> bool:
        """Return when there is a live request, True, or when closed, False."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or bool(self._live))
            return not self._is_closing

    def take(self) -> list[Sequence]:
        """The requests that arrived since the last call, in order."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            return arrived

    def live(self) -> list[Sequence]:
        """All requests that have not ended."""
        with self._changed:
            return list(self._live.values())

    def forget(self, sequence: Sequence) -> None:
        """A request has ended: its id is free again."""
        with self._changed:
            del self._live[sequence.request.request_id]
