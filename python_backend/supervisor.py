"""Sees a stage die, says so at once, has it restarted, and says when it is back.

    up ──── no pulse ────▶ down ──── restart ────▶ restarting ──── pulse ────▶ up
                             ▲                          │
                             └──── failed, wait ────────┘
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from python_backend.errors import RelayError

logger = logging.getLogger(__name__)

LOOK_S = 0.05
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Supervisor:
    """Watches replicas by their pulse. Its callbacks run on its own threads and must not block.

    A replica is taken for up until it was seen down after having been seen up, so that one that is still
    loading is not restarted. `restart` blocks until the replica is loaded again, and raises when it is not.
    """

    def __init__(
        self,
        replicas: Iterable[str],
        is_alive: Callable[[str], bool],
        restart: Callable[[str], None],
        on_death: Callable[[str], None],
        on_return: Callable[[str], None],
        look_s: float = LOOK_S,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._is_alive = is_alive
        self._restart = restart
        self._on_death = on_death
        self._on_return = on_return
        self._look_s = look_s
        self._first_pause_s = first_pause_s
        self._unseen = set(replicas)
        self._up: set[str] = set()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops looking; a restart under way is left to itself."""
        self._is_closed.set()
        self._thread.join(timeout=5)

    def _work(self) -> None:
        while not self._is_closed.wait(self._look_s):
            try:
                self._look()
            except Exception:  # the watch must go on
                logger.exception("the supervisor failed")

    def _look(self) -> None:
        with self._lock:
            unseen, up = list(self._unseen), list(self._up)
        for name in unseen:
            if self._is_alive(name):
                self._move(name, self._unseen, self._up)
        for name in up:
            if not self._is_alive(name):
                with self._lock:
                    self._up.discard(name)
                logger.error("%s died; its requests go elsewhere while it is restarted", name)
                self._on_death(name)
                threading.Thread(target=self._bring_back, args=(name,), name=f"restart {name}", daemon=True).start()

    def _bring_back(self, name: str) -> None:
        pause_s = self._first_pause_s
        while not self._is_closed.is_set():
            try:
                self._restart(name)
            except RelayError as error:
                logger.error("%s could not be restarted, again in %g s: %s", name, pause_s, error)
                if self._is_closed.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            with self._lock:
                self._up.add(name)
            logger.info("%s is back", name)
            self._on_return(name)
            return

    def _move(self, name: str, source: set[str], target: set[str]) -> None:
        with self._lock:
            source.discard(name)
            target.add(name)
