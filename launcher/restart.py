"""Restarts a model whose process died: Triton 2.51 does not, and still calls it ready."""

from __future__ import annotations

import functools
import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterable

from launcher.triton import CONTROL_HEADER, Ports
from python_backend.pulse import end_process, is_beating, pulse_path
from python_backend.supervisor import PulseWatch

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
SETTLE_S = 0.5  # a model that was loaded beats by then


class RestartFailed(RuntimeError):
    """Triton refused to unload or load a model."""


class Restarter:
    """Unloads and loads stages of one server whose pulse stops, until they are back or it is closed.

    Requests that hang in the dead process hang on in Triton; the scheduler has answered their clients.
    """

    def __init__(self, boot_id: str, ports: Ports, control_key: str, models: Iterable[str]) -> None:
        self._boot_id = boot_id
        self._ports = ports
        self._control_key = control_key
        self._lock = threading.Lock()
        self._restarting: set[str] = set()
        self._is_closed = threading.Event()
        self._watch = PulseWatch(
            models,
            is_alive=self._is_alive,
            on_death=self._begin,
            on_return=lambda name: None,
        )

    def close(self) -> None:
        """Restarts nothing from now on."""
        self._is_closed.set()
        self._watch.close()

    def _begin(self, model: str) -> None:
        with self._lock:
            if model in self._restarting:  # it was ended by the restart that is under way
                return
            self._restarting.add(model)
        threading.Thread(target=self._restart, args=(model,), name=f"restart {model}", daemon=True).start()

    def _restart(self, model: str) -> None:
        while not self._is_closed.is_set():
            retry(
                functools.partial(self._reload, model),
                is_over=self._is_closed.is_set,
                pause=self._is_closed.wait,
                what=f"{model} could not be restarted",
            )
            self._is_closed.wait(SETTLE_S)
            with self._lock:  # if it died again meanwhile, that was not reported to anybody else
                if self._is_alive(model):
                    self._restarting.discard(model)
                    return

    def _reload(self, model: str) -> None:
        end_process(pulse_path(self._boot_id, model))
        self._control(model, "unload")
        self._control(model, "load")

    def _is_alive(self, name: str) -> bool:
        return is_beating(pulse_path(self._boot_id, name), time.monotonic())

    def _control(self, model: str, verb: str) -> None:
        """Asks Triton to load or unload; returns when it has.

        Raises:
            RestartFailed: it refused, or does not answer.
        """
        connection = http.client.HTTPConnection(self._ports.near_host, self._ports.http, timeout=LOAD_TIMEOUT_S)
        headers = {CONTROL_HEADER: self._control_key, "Content-Type": "application/json"}
        try:
            connection.request("POST", f"/v2/repository/models/{model}/{verb}", "{}", headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise RestartFailed(f"{verb}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise RestartFailed(f"{verb}: {response.status} {text.strip()[:300]}")


def retry(act: Callable[[], object], is_over: Callable[[], bool], pause: Callable[[float], bool], what: str) -> None:
    """Does `act` until it raises no `RestartFailed`, with pauses that double; gives up when it is over."""
    pause_s = FIRST_PAUSE_S
    while not is_over():
        try:
            act()
            return
        except RestartFailed as error:
            if is_over():
                return
            logger.warning("%s, again in %g s: %s", what, pause_s, error)
        if pause(pause_s):
            return
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
