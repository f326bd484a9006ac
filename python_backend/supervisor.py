"""Sees stages die and come back, by their pulse.

    up ──── no pulse ────▶ down ──── pulse ────▶ up

The scheduler watches to route around the dead; the launcher watches to restart them. The restart is not the
scheduler's: Triton's call that loads a model holds Python's lock until it is loaded, so every stream would stop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

LOOK_S = 0.05
# A process beats a moment before Triton lets requests through to it. Asking Triton itself (`is_model_ready`) from
# another thread than a request's was seen to abort the server.
LOOKS_TO_RETURN = 10


class PulseWatch:
    """Tells when a replica dies and when it is back. The callbacks run on its thread and must not block.

    A replica that has never been seen up is neither: it is still loading.
    """

    def __init__(
        self,
        replicas: Iterable[str],
        is_alive: Callable[[str], bool],
        on_death: Callable[[str], None],
        on_return: Callable[[str], None],
        look_s: float = LOOK_S,
        looks_to_return: int = LOOKS_TO_RETURN,
    ) -> None:
        self._is_alive = is_alive
        self._on_death = on_death
        self._on_return = on_return
        self._look_s = look_s
        self._looks_to_return = looks_to_return
        self._is_up: dict[str, bool | None] = dict.fromkeys(replicas)
        self._num_beats = dict.fromkeys(self._is_up, 0)  # looks in a row that found a pulse
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pulse watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops looking."""
        self._is_closed.set()
        self._thread.join(timeout=5)

    def _work(self) -> None:
        while not self._is_closed.wait(self._look_s):
            for name, was_up in list(self._is_up.items()):
                try:
                    self._look(name, was_up)
                except Exception:  # the watch over the others must go on
                    logger.exception("the watch over %s failed", name)

    def _look(self, name: str, was_up: bool | None) -> None:
        is_up = self._is_alive(name)
        self._num_beats[name] = self._num_beats[name] + 1 if is_up else 0
        is_returning = was_up is False and is_up and self._num_beats[name] < self._looks_to_return
        if is_up == was_up or is_returning or (was_up is None and not is_up):
            return
        self._is_up[name] = is_up
        if not is_up:
            logger.error("%s died", name)
            self._on_death(name)
        elif was_up is False:
            logger.info("%s is back", name)
            self._on_return(name)
