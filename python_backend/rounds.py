"""Something done again and again, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Rounds:
    """Calls `act` every `pause_s`, until it is closed. A round that raises is logged, and the next one comes."""

    def __init__(self, name: str, pause_s: float, act: Callable[[], None]) -> None:
        self._name = name
        self._pause_s = pause_s
        self._act = act
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = 5.0) -> None:
        """Begins no more rounds, and waits so long for the one that is under way; None: as long as it takes."""
        self._is_closed.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while not self._is_closed.wait(self._pause_s):
            try:
                self._act()
            except Exception:  # whoever is looked after next must not pay for it
                logger.exception("a round of the %s failed", self._name)
