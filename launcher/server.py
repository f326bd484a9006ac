"""One running tritonserver: started, waited for, drained, stopped, cleaned up after."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from client.shared_memory import KEY_VARIABLE
from launcher.restart import Restarter
from launcher.tracing import trace_flags
from launcher.triton import Keys, Ports, Triton, build_backend_folder, command, environment
from python_backend.checkpoint import PROJECT_ROOT
from python_backend.transport.janitor import remove_orphans
from scheduler.plan import DRAIN_FILE, Plan
from scheduler.render import write

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
EXIT_TIMEOUT_S = 10  # after draining nothing should be left but what hangs in processes that died
POLL_S = 0.1
_GAUGES = re.compile(rb"^vlm_relay_(?:in_flight|waiting)_requests\{[^}]*\} (\S+)$", re.MULTILINE)


class ServerFailed(RuntimeError):
    """The server could not start, or stopped by itself; the message has its last words."""


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
        self._log = log
        self._tail: deque[str] = deque(maxlen=200)
        self.region = f"vlm_relay_triton_{os.getpid()}_{self.folder.name[-8:]}"
        self._control_key = keys.control
        self._restarter: Restarter | None = None
        repository = self.folder / "models"
        self._models = write(plan, PROJECT_ROOT / "model_repository", repository)
        for path, file in (files or {}).items():
            (repository / path).symlink_to(file.resolve())
        backends = build_backend_folder(triton, self.folder / "backends")
        self._process = subprocess.Popen(
            command(triton, repository, backends, ports, self.region, EXIT_TIMEOUT_S, keys) + tracing,
            env=environment(triton, variables),
            cwd=PROJECT_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us: we drain first
            preexec_fn=_die_with_parent,
        )
        self._drain_file = repository / DRAIN_FILE
        self._reader = threading.Thread(target=self._pass_on, name="log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id of tritonserver."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

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
            if not self.is_running():
                code = self._process.returncode
                raise ServerFailed(f"tritonserver stopped while loading (exit code {code}){self._last_words()}")
            if time.monotonic() > until:
                raise TimeoutError(f"tritonserver was not ready after {timeout_s:g} s")
            time.sleep(POLL_S)

    def keep_alive(self) -> None:
        """Restarts models whose process dies, from now until the server stops."""
        self._restarter = Restarter(self.pid, self.ports, self._control_key, self._models)

    def num_in_flight(self) -> int | None:
        """Requests being served or waiting, as the metrics say; None when they do not answer."""
        text = self._get(self.ports.metrics, "/metrics")
        return None if text is None else int(sum(float(value) for value in _GAUGES.findall(text)))

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones; whether all of them ended in time."""
        self._drain_file.touch()
        until = time.monotonic() + timeout_s
        num_idle = 0
        while time.monotonic() < until and self.is_running():
            num_idle = num_idle + 1 if self.num_in_flight() == 0 else 0
            if num_idle == 3:  # the gauges lag behind a little
                return True
            time.sleep(POLL_S)
        return not self.is_running()

    def stop(self) -> None:
        """Ends the server and removes what it left: its folder, its shared memory."""
        if self._restarter is not None:
            self._restarter.close()
        if self.is_running():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(EXIT_TIMEOUT_S + 10)
            except subprocess.TimeoutExpired:
                logger.warning("tritonserver did not stop in %d s: killed", EXIT_TIMEOUT_S + 10)
        self.kill()

    def kill(self) -> None:
        """Ends the server at once, with its stubs, and removes what it left."""
        if self._restarter is not None:
            self._restarter.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=5)
        for path in SHARED_MEMORY.glob(f"{self.region}*"):
            path.unlink(missing_ok=True)
        for name in remove_orphans():
            logger.debug("removed %s", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _pass_on(self) -> None:
        """Copies the server's output to the log, line by line."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if _is_noise(line):
                continue
            self._tail.append(line)
            with contextlib.suppress(OSError, ValueError):  # a log that was closed stops nobody
                self._log.write(line)
                self._log.flush()

    def _last_words(self) -> str:
        self._reader.join(timeout=1)
        errors = [line for line in self._tail if re.search(r"[Ee]rror|failed|refused", line)]
        return "".join(f"\n  {line.rstrip()[:500]}" for line in (errors or list(self._tail))[-6:])

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


# What tritonserver says on every machine without a GPU, and the table of its options.
_NOISE = (
    "Unable to allocate pinned system memory",
    "CUDA memory pool disabled",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
)


def _is_noise(line: str) -> bool:
    return any(words in line for words in _NOISE) or not line.strip() or line.startswith(("+--", "| "))


def _die_with_parent() -> None:
    """In the child: get SIGTERM when the launcher dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
