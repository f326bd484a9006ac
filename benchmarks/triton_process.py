"""A tritonserver with a repository of the benchmark's own, started and ended like the product's."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc as grpc

from launcher.process import ServerFailed
from launcher.server import SHARED_MEMORY, choose_ports
from launcher.triton import Keys, Ports, build_backend_folder, command, environment, find_triton
from python_backend.checkpoint import PROJECT_ROOT
from python_backend.transport.boot import PREFIX, identity
from python_backend.transport.janitor import remove_orphans

READY_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 15
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class TritonProcess:
    """A running server: where it listens, and how its files in shared memory begin."""

    pid: int
    ports: Ports
    region: str

    def region_bytes(self) -> int:
        """What the Python backend's own regions take of /dev/shm now, in touched pages."""
        return _taken_bytes(f"{self.region}*")

    def store_bytes(self) -> int:
        """What embedding stores of this server take of /dev/shm."""
        return _taken_bytes(f"{PREFIX}{identity(self.pid)}.*")


@contextlib.contextmanager
def serving(
    repository: Path, settings: Mapping[str, int], variables: Mapping[str, str], log_path: Path
) -> Iterator[TritonProcess]:
    """A server on 127.0.0.1 with all models of `repository` loaded.

    `settings` are the Python backend's; `variables` go into the server's environment, above this process's own.

    Leaves nothing in /dev/shm.

    Raises:
        ServerFailed: it stopped or was not ready in time; its output is in `log_path`.
    """
    triton = find_triton()
    ports = choose_ports("127.0.0.1", 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="vlm-relay-bench-") as folder, log_path.open("w") as log:
        region = f"vlm_relay_bench_{os.getpid()}_{Path(folder).name[-8:]}"
        backends = build_backend_folder(triton, Path(folder))
        keys = Keys(secrets.token_hex(16), secrets.token_hex(16))
        line = command(triton, repository, backends, ports, region, EXIT_TIMEOUT_S, keys)
        line += [f"--backend-config=python,{name}={value}" for name, value in settings.items()]
        process = subprocess.Popen(
            line,
            env=environment(triton, {**os.environ, **variables}),
            cwd=PROJECT_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_ready(process, ports, log_path)
            yield TritonProcess(process.pid, ports, region)
        finally:
            _end(process)
            for path in SHARED_MEMORY.glob(f"{region}*"):
                path.unlink(missing_ok=True)
            remove_orphans()


def _wait_ready(process: subprocess.Popen[bytes], ports: Ports, log_path: Path) -> None:
    until = time.monotonic() + READY_TIMEOUT_S
    with grpc.InferenceServerClient(f"{ports.host}:{ports.grpc}") as client:
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(grpc.InferenceServerException):
                if client.is_server_ready():
                    return
            time.sleep(POLL_S)
    raise ServerFailed(f"tritonserver did not become ready; see {log_path}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks it to stop, then ends what is left of its process group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_TIMEOUT_S + 10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _taken_bytes(pattern: str) -> int:
    return sum(path.stat().st_blocks * 512 for path in SHARED_MEMORY.glob(pattern))
