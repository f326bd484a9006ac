"""Sees stages die and come back, by their pulse.

    up ──── no pulse ────▶ down ──── pulse ────▶ up

The scheduler watches to route around the dead; the launcher watches to restart them. The restart is not the
scheduler's: Triton's call that loads a model holds Python's lock until it is loaded, so every stream would stop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from python_backend.rounds import Rounds

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
        self._looks_to_return = looks_to_return
        self._is_up: dict[str, bool | None] = dict.fromkeys(replicas)
        self._num_beats = dict.fromkeys(self._is_up, 0)  # looks in a row that found a pulse
        self._rounds = Rounds("pulse watch", look_s, self._look_at_all)

    def close(self) -> None:
        """Stops looking."""
        self._rounds.close()

    def _look_at_all(self) -> None:
        for name, was_up in self._is_up.items():
            self._look(name, was_up)

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
