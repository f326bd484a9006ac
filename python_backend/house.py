"""Who is served and who waits: the bounds of a server, behind one lock."""

from __future__ import annotations

import threading

from python_backend.errors import Overloaded
from python_backend.placing import Placing
from python_backend.stream import Attempt, Encoded, Stream
from scheduler.admission import WaitingRoom
from scheduler.profile import LimitsTable

USUAL_PROMPT_TOKENS = 600  # of a request that was not tokenised yet: an image and a question
SHORTEST_HINT_S, LONGEST_HINT_S = 0.1, 60.0


class House:
    """The requests of one relay. Any thread may call it.

    A request waits in the room, then it is served: it has a place, and arrives until a decision has charged it to
    replicas.
    """

    def __init__(self, placing: Placing, limits: LimitsTable) -> None:
        self._placing, self._limits = placing, limits
        self._lock = threading.Lock()  # also guards what attempts hold and wait for
        self._room: WaitingRoom[Stream] = WaitingRoom(limits.max_waiting + 1, limits.ageing_s)
        self._serving: set[Stream] = set()
        self._num_arriving = 0  # of those, not charged for yet

    def counts(self) -> tuple[int, int]:
        """How many are served, and how many wait."""
        with self._lock:
            return len(self._serving), len(self._room)

    def everybody(self) -> tuple[list[Stream], list[Stream]]:
        """Those who are served, and those who wait."""
        with self._lock:
            return list(self._serving), self._room.items()

    # -- in and out ---------------------------------------------------------------------------------------

    def rank(self, priority: int, now_s: float) -> float:
        """The order of one that comes now: smaller is served first."""
        return self._room.rank(priority, now_s)

    def enter(self, stream: Stream, now_s: float) -> Overloaded | None:
        """Lets a request wait, or says why it cannot."""
        with self._lock:
            refusal = self._refusal(stream, now_s)
            if refusal is None:
                self._room.enter(stream, stream.request.priority, stream.deadline_s, now_s)
            return refusal

    def serve_next(self, now_s: float) -> Stream | None:
        """The most urgent of those who wait, who has a place from now on; None if no place is free, or nobody waits."""
        with self._lock:
            stream = self._room.take(now_s) if self._has_place() else None
            if stream is not None:
                self._serving.add(stream)
                self._num_arriving += 1
                stream.attempt.is_arriving = True
                stream.progress_s = now_s  # waiting for a place was no silence of a stage
            return stream

    def note_arrived(self, attempt: Attempt) -> None:
        """An attempt is charged for now, or over."""
        with self._lock:
            if attempt.is_arriving:
                attempt.is_arriving = False
                self._num_arriving -= 1

    def leave(self, stream: Stream) -> None:
        """Frees the place of one that was served."""
        with self._lock:
            self._serving.discard(stream)

    def expire(self, now_s: float) -> list[Stream]:
        """Those whose deadline passed while they waited; they wait no more."""
        with self._lock:
            return self._room.expire(now_s)

    def send_away(self, streams: list[Stream]) -> None:
        """Those of them who wait do so no more."""
        with self._lock:
            self._room.remove({id(stream) for stream in streams})

    # -- what an attempt holds ----------------------------------------------------------------------------

    def wait_on(self, attempt: Attempt, *replicas: str) -> None:
        """Notes whom an attempt waits for.

        Raises:
            PeerGone: that one died since it was chosen.
        """
        with self._lock:
            attempt.waits_on = frozenset(replicas)
        self._placing.check_up(replicas)

    def waiting_for(self, name: str) -> list[tuple[Stream, Attempt]]:
        """The requests, with their attempts, that wait for a replica."""
        with self._lock:
            return [(stream, stream.attempt) for stream in self._serving if name in stream.attempt.waits_on]

    def keep(self, attempt: Attempt, encoded: Encoded) -> None:
        """Notes a lease that an attempt holds, also one that comes after the attempt was given back."""
        with self._lock:
            attempt.keep(encoded)

    def take_handles(self, attempt: Attempt) -> list[bytes]:
        """The handles that an attempt holds, which holds none and waits for nobody from now on."""
        with self._lock:
            attempt.waits_on = frozenset()
            handles, attempt.handles = attempt.handles, []
        return handles

    # -- bounds, for a caller who holds the lock ----------------------------------------------------------

    def _has_place(self) -> bool:
        """Whether one more may be served now, so far as bounds and decoders go."""
        return len(self._serving) < self._limits.max_in_flight and self._placing.has_room(self._num_arriving)

    def _refusal(self, stream: Stream, now_s: float) -> Overloaded | None:
        """Why a request cannot even wait; None when it can, or need not."""
        if self._has_place():
            return None
        limits, request = self._limits, stream.request
        allowed_s = min(limits.max_wait_s, request.deadline_s or limits.max_wait_s)
        turn_s = self._placing.turn_s(USUAL_PROMPT_TOKENS, request.sampling.max_tokens)
        found = self._room.refusal(request.priority, now_s, limits.max_waiting, allowed_s, turn_s)
        if found is None:
            return None
        return Overloaded(f"{len(self._serving)} requests are in flight and {found.text}", _hint(found.retry_after_s))


def _hint(seconds: float) -> float:
    """When to try again: a rounded wait, within reason."""
    return round(min(LONGEST_HINT_S, max(SHORTEST_HINT_S, seconds)), 1)
