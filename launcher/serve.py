"""`vlm-relay serve`: from a profile to a server that has answered a question, and back to nothing."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from client import RelayClient, RelayClientError
from launcher.build import build, engine_files, fit_engine
from launcher.links import measure
from launcher.probes import grey_picture, health_of, probing
from launcher.process import ServerFailed
from launcher.server import Server, choose_ports
from launcher.triton import find_triton
from python_backend.checkpoint import PROJECT_ROOT
from scheduler.deployment import plan_for
from scheduler.plan import Plan
from scheduler.profile import Profile, check_redis_url, read_profile

logger = logging.getLogger(__name__)

DEFAULT_PROFILE = PROJECT_ROOT / "deploy" / "profiles" / "cpu.toml"
READY_TIMEOUT_S = 600.0
CANARY_TIMEOUT_S = 120.0

Say = Callable[[str], None]


def plan_of(
    profile_path: Path, checkpoint: str | None, artifacts: str | None = None, redis_url: str | None = None
) -> Plan:
    """The plan of a profile, with another checkpoint, folder for what is built from it, or shared cache if given.

    Raises:
        ValueError: the profile or one of them cannot be used.
    """
    profile: Profile = read_profile(profile_path)
    given = {"checkpoint": checkpoint, "artifacts": artifacts}
    changes = {key: str(Path(path).resolve()) for key, path in given.items() if path is not None}
    profile = profile.model_copy(update={"model": profile.model.model_copy(update=changes)})
    if redis_url is not None:
        encode = profile.encode.model_copy(update={"redis_url": check_redis_url(redis_url)})
        profile = profile.model_copy(update={"encode": encode})
    return plan_for(profile, profile_path)


@contextlib.contextmanager
def running(
    plan: Plan,
    ports: tuple[str, int, int, int],
    variables: Mapping[str, str],
    say: Say,
    log: io.TextIOBase | None = None,
    stopping: threading.Event | None = None,
) -> Iterator[Server]:
    """A server that has answered the canary; drained and stopped at the end of the block.

    `ports` are host, HTTP, gRPC and metrics; a port of 0 is any free one. When `stopping` is set while the
    server loads, it is ended without ado.
    """
    stopping = stopping or threading.Event()
    triton = find_triton()
    chosen = choose_ports(*ports)
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **variables}  # nvidia-smi's numbers, as the plan has them
    plan = measure(plan, variables, say)
    plan = fit_engine(plan)
    files = engine_files(plan, build(plan, say, variables=variables))
    say(f"starting tritonserver with {', '.join(r.name for r in (*plan.encoders, *plan.decoders))}")
    began = time.monotonic()
    server = Server(plan, triton, chosen, variables, log or sys.stderr, files)  # type: ignore[arg-type]
    is_serving = False
    try:
        _wait(server, stopping)
        if not stopping.is_set():
            answer_canary(f"{chosen.near_host}:{chosen.grpc}")
            server.keep_alive()
            is_serving = True
            say(
                f"ready after {time.monotonic() - began:.1f} s: gRPC {chosen.host}:{chosen.grpc}, "
                f"HTTP {chosen.host}:{chosen.http}, metrics {chosen.host}:{chosen.metrics}"
            )
        yield server
    finally:
        try:
            if is_serving:
                _drain(server, plan.limits.drain_s, say)
                server.stop()
        finally:  # it never served, or somebody does not want to wait
            server.kill()
            say("stopped")


def serve(
    plan: Plan,
    ports: tuple[str, int, int, int],
    variables: Mapping[str, str],
    say: Say,
    health_port: int | None = None,
) -> int:
    """Serves until SIGINT, SIGTERM or the server's death; the exit code. With a health port, see `launcher.probes`."""
    stopping = threading.Event()
    with (
        _signals(stopping),
        probing(ports[0], health_port) as probes,
        running(plan, ports, variables, say, stopping=stopping) as server,
    ):
        if probes is not None and not stopping.is_set():
            probes.attach(health_of(server), lambda: server.drain(plan.limits.drain_s))
            say(f"health on http://{server.ports.near_host}:{probes.port}/health/ready")
        while not stopping.wait(0.2):
            if not server.is_running():
                raise ServerFailed("tritonserver stopped by itself; see its last lines above")
        if probes is not None:
            probes.leave()
    return 0


def answer_canary(address: str) -> None:
    """Asks one question about a grey picture, to see that the whole journey works.

    Raises:
        ServerFailed: no answer.
    """
    try:
        with RelayClient(address) as client:
            client.ask("What is this?", images=[grey_picture()], max_tokens=1, deadline_s=CANARY_TIMEOUT_S)
    except RelayClientError as error:
        raise ServerFailed(f"the server is up but did not answer a question: {error}") from error


def _drain(server: Server, timeout_s: float, say: Say) -> None:
    """Until running requests have ended, if it runs."""
    if server.is_running():
        say("stopping: new requests are refused, running ones finish")
        if not server.drain(timeout_s):
            say(f"some requests did not finish in {timeout_s:g} s")


def _wait(server: Server, stopping: threading.Event) -> None:
    """Until the server is ready, or is told to stop."""
    until = time.monotonic() + READY_TIMEOUT_S
    while not stopping.is_set():
        with contextlib.suppress(TimeoutError):
            server.wait_ready(min(0.5, max(0.0, until - time.monotonic())))
            return
        if time.monotonic() > until:
            raise ServerFailed(f"tritonserver was not ready after {READY_TIMEOUT_S:g} s")


@contextlib.contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
    """Sets `stopping` on the first SIGINT or SIGTERM; a second one interrupts the wait for running requests."""

    def handle(number: int, _frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
