"""Where requests go on this server: decided, charged, given back, and learnt from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from python_backend.errors import Overloaded, PeerGone
from scheduler.decision import Decision, StagesFull
from scheduler.ledger import Ledger, Place
from scheduler.loads import Loads, RequestShape
from scheduler.observed import Observed, learn
from scheduler.routing import Router

RESTART_S = 5.0  # the hint to those who ask while all of a stage is down


class Placing:
    """The router and the loads it looks at, behind one lock. Any thread may call it."""

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self._router = router
        self._clock = clock
        self._lock = threading.Lock()
        self._ledger = Ledger(router.idle())
        self._down: set[str] = set()

    @property
    def loads(self) -> Loads:
        """What each replica has before it, as it changes."""
        return self._ledger.loads

    def has_room(self, num_arriving: int) -> bool:
        """Whether one more may be placed beside `num_arriving` that soon will be.

        With no decoder up it may: it is refused at once then, and need not wait.
        """
        with self._lock:
            is_up = any(load.is_available for load in self.loads.decoders.values())
            return not is_up or self._router.has_room(self.loads, num_arriving)

    def turn_s(self, prompt_tokens: int, max_tokens: int) -> float:
        """See `Router.turn_s`."""
        with self._lock:
            return self._router.turn_s(prompt_tokens, max_tokens)

    def take(self, shape: RequestShape, prefixes: Sequence[tuple[bytes, int]]) -> Place:
        """Places a request and charges its replicas. `prefixes` are the keys of its prompt's beginnings.

        Raises:
            Overloaded: a stage that it needs is down or full.
        """
        with self._lock:
            shape = self._ledger.with_known_prefix(shape, prefixes)
            try:
                decision = self._router.decide(shape, self.loads, self._clock())
            except LookupError as error:
                raise Overloaded(f"{error} just now: it died and is being restarted", RESTART_S) from error
            except StagesFull as error:
                raise Overloaded(str(error), error.retry_after_s) from error
            self._ledger.note_prefixes(decision.decoder, prefixes)
            return self._ledger.take(decision, shape)

    def note_encoded(self, place: Place) -> None:
        """Takes a request's images off the encoders' queues, once."""
        with self._lock:
            self._ledger.note_encoded(place)

    def give_back(self, place: Place) -> None:
        """Takes off all that a request is still charged for, once."""
        with self._lock:
            self._ledger.give_back(place)

    # -- who is there -------------------------------------------------------------------------------------

    def died(self, name: str) -> None:
        """Places nothing on a replica until it has returned."""
        with self._lock:
            self._down.add(name)
            self._ledger.set_available(name, False)

    def returned(self, name: str) -> None:
        """Places requests on a replica again; its caches are empty."""
        with self._lock:
            self._down.discard(name)
            self._ledger.set_available(name, True)

    def is_down(self, name: str) -> bool:
        """Whether a replica died and has not returned."""
        with self._lock:
            return name in self._down

    def check_up(self, names: Sequence[str]) -> None:
        """Raises `PeerGone` when one of these replicas is down."""
        with self._lock:
            for name in names:
                if name in self._down:
                    raise PeerGone(f"{name} died; retry")

    # -- what is learnt -----------------------------------------------------------------------------------

    def learn(self, decision: Decision, observed: Observed) -> None:
        """Corrects the predictions of the replicas that served a request, by how long they really took."""
        with self._lock:
            learn(self._router, decision, observed)
