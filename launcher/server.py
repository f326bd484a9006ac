"""One running tritonserver: started, waited for, drained, stopped, cleaned up after."""

from __future__ import annotations

import contextlib
import functools
import http.client
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from client.shared_memory import KEY_VARIABLE
from launcher.guard import Guard
from launcher.process import ServerFailed, TritonProcess
from launcher.restart import Restarter
from launcher.tracing import trace_flags
from launcher.triton import Keys, Ports, Triton, build_backend_folder, command, environment
from python_backend.checkpoint import PROJECT_ROOT
from python_backend.pulse import is_beating, pulse_path
from python_backend.transport.boot import identity, is_alive
from python_backend.transport.janitor import remove_orphans
from scheduler.plan import DRAIN_FILE, FRONT, Plan
from scheduler.render import write

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
REGION = "vlm_relay_triton."  # begins the names of Triton's shared memory; who launched it, and chance, follow
EXIT_TIMEOUT_S = 10  # after draining nothing should be left but what hangs in processes that died
POLL_S = 0.1
_GAUGES = re.compile(rb"^vlm_relay_(?:in_flight|waiting)_requests\{[^}]*\} (\S+)$", re.MULTILINE)


class PortBusy(ServerFailed):
    """Somebody listens on a port that was asked for."""


def choose_ports(host: str, http_port: int, grpc_port: int, metrics_port: int) -> Ports:
    """The ports asked for, 0 replaced by free ones.

    Raises:
        PortBusy: one of them is taken; the message names it.
    """
    sockets = []
    try:
        for name, port in (("http", http_port), ("grpc", grpc_port), ("metrics", metrics_port)):
            probe = socket.socket()
            sockets.append(probe)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)  # or the same port could be had twice
            except OSError as error:
                advice = f"give another with --{name}-port, or 0 for a free one"
                raise PortBusy(f"{name} port {port} on {host}: {error.strerror}; {advice}") from error
        return Ports(host, *(probe.getsockname()[1] for probe in sockets))
    finally:
        for probe in sockets:
            probe.close()


def remove_left_regions(directory: Path = SHARED_MEMORY) -> None:
    """Removes the shared memory of tritonservers whose launcher was killed."""
    for path in directory.glob(f"{REGION}*"):
        with contextlib.suppress(ValueError, OSError):  # not a name of ours; another user's
            if not is_alive(path.name.removeprefix(REGION).split(".")[0]):
                path.unlink()


class Server:
    """A tritonserver with the models of a plan, in a folder of its own that goes when it stops."""

    def __init__(
        self,
        plan: Plan,
        triton: Triton,
        ports: Ports,
        variables: Mapping[str, str],
        log: IO[str],
        files: Mapping[str, Path] | None = None,
    ) -> None:
        """Starts it. `files` are linked into the repository by their path in it."""
        keys = Keys(secrets.token_hex(16), variables.get(KEY_VARIABLE) or secrets.token_hex(16))
        tracing = trace_flags(variables)
        self.plan = plan
        self.ports = ports
        self.folder = Path(tempfile.mkdtemp(prefix="vlm-relay-"))
        remove_left_regions()
        self.region = f"{REGION}{identity(os.getpid())}.{secrets.token_hex(4)}"
        self._control_key = keys.control
        self._restarter: Restarter | None = None
        repository = self.folder / "models"
        self._models = write(plan, PROJECT_ROOT / "model_repository", repository)
        for path, file in (files or {}).items():
            (repository / path).symlink_to(file.resolve())
        backends = build_backend_folder(triton, self.folder / "backends")
        line = command(triton, repository, backends, ports, self.region, EXIT_TIMEOUT_S, keys) + tracing
        self._launch = functools.partial(TritonProcess, line, environment(triton, variables), PROJECT_ROOT, log)
        self._process = self._launch()
        self.boot_id = identity(self.pid)  # another one after it was started anew
        self._guard: Guard | None = None
        self._drain_file = repository / DRAIN_FILE

    @property
    def pid(self) -> int:
        """The process id of tritonserver; another one after it was started anew."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the process lives, or is being started anew."""
        return self._process.exit_code is None or (self._guard is not None and not self._guard.has_given_up)

    def is_ready(self) -> bool:
        """Whether all models are loaded."""
        return self._get(self.ports.http, "/v2/health/ready") is not None

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when all models are loaded.

        Raises:
            ServerFailed: it stopped.
            TimeoutError: it was not ready in time.
        """
        until = time.monotonic() + timeout_s
        while not self.is_ready():
            code = self._process.exit_code
            if code is not None:
                raise ServerFailed(f"tritonserver stopped while loading (exit code {code}){self._process.last_words()}")
            if time.monotonic() > until:
                raise TimeoutError(f"tritonserver was not ready after {timeout_s:g} s")
            time.sleep(POLL_S)

    def keep_alive(self) -> None:
        """From now until the server stops: restarts stages that die, and all of it when it or the scheduler does."""
        self._watch_stages()
        self._guard = Guard(self._is_lost, self._start_anew)

    def _watch_stages(self) -> None:
        stages = [name for name in self._models if name != FRONT]
        self._restarter = Restarter(self.boot_id, self.ports, self._control_key, stages)

    def _is_lost(self) -> bool:
        """Whether nothing but a new start helps.

        Whoever had a stream with a scheduler that died would wait on it for ever, and so would the stages.
        """
        if self._process.exit_code is not None:
            return True
        front = pulse_path(self.boot_id, FRONT)
        return front.exists() and not is_beating(front, time.monotonic())

    def _start_anew(self, is_over: Callable[[], bool]) -> None:
        """Ends what is left and starts again on the same ports; returns when it is ready, or has ended as `is_over`.

        Raises:
            ServerFailed: it stopped again while loading.
        """
        self._end()
        self._process = self._launch()
        self.boot_id = identity(self.pid)
        while not is_over():
            with contextlib.suppress(TimeoutError):
                self.wait_ready(POLL_S)
                self._watch_stages()
                return
        self._end()

    def _end(self) -> None:
        """Kills what runs and removes its shared memory."""
        if self._restarter is not None:
            self._restarter.close()
        self._process.kill()
        for path in SHARED_MEMORY.glob(f"{self.region}*"):
            path.unlink(missing_ok=True)
        for name in remove_orphans():
            logger.debug("removed %s", name)

    def num_in_flight(self) -> int | None:
        """Requests being served or waiting, as the metrics say; None when they do not answer."""
        text = self._get(self.ports.metrics, "/metrics")
        return None if text is None else int(sum(float(value) for value in _GAUGES.findall(text)))

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones; whether all of them ended in time.

        From now on it is not started anew when it is lost, as nobody's requests are left then.
        """
        self._drain_file.touch()
        if self._guard is not None:
            self._guard.give_up()
        until = time.monotonic() + timeout_s
        num_idle = 0
        while time.monotonic() < until and not self._is_lost():
            num_idle = num_idle + 1 if self.num_in_flight() == 0 else 0
            if num_idle == 3:  # the gauges lag behind a little
                return True
            time.sleep(POLL_S)
        return self._is_lost()

    def stop(self) -> None:
        """Ends the server and removes what it left: its folder, its shared memory."""
        self._end_watches()
        if self._process.exit_code is None and not self._process.terminate(EXIT_TIMEOUT_S + 10):
            logger.warning("tritonserver did not stop in %d s: killed", EXIT_TIMEOUT_S + 10)
        self.kill()

    def kill(self) -> None:
        """Ends the server at once, with its stubs, and removes what it left; nothing when it was ended before."""
        self._end_watches()
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_watches(self) -> None:
        if self._guard is not None:
            self._guard.close()
        if self._restarter is not None:
            self._restarter.close()

    def _get(self, port: int, path: str) -> bytes | None:
        """The body of a 200 answer, else None."""
        connection = http.client.HTTPConnection(self.ports.near_host, port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            return body if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
