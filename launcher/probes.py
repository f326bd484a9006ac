"""The health port: what Kubernetes asks a server that `vlm-relay serve` runs, and how it tells it to leave.

/health/ready     200: a question was answered lately, or there is just no room for one
                  503: loading, draining, or not working; the body says which
/health/live      the same, but 200 while loading or draining
/drain?after_s=5  not ready at once, still serving for `after_s`, then refusing with a retry hint;
                  200 when all running requests have ended, 503 when some did not in time
"""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import logging
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from client import RelayClient, RelayClientError
from client.errors import Overloaded
from launcher.server import PortBusy, Server
from python_backend.pulse import is_beating, pulse_path
from scheduler.plan import FRONT, Plan

logger = logging.getLogger(__name__)

CACHE_S = 5.0  # a question costs one prefill; those who ask more often share its answer
ASK_TIMEOUT_S = 6.0  # below the probes' own timeout
MOST_URGENT = -100
LONGEST_LEAVE_S = 300.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether requests can be sent here, and why not."""

    is_working: bool
    detail: str


class Health:
    """Whether one server answers questions. Any thread may ask; the answer is at most `cache_s` old.

    A stage that has no living process left is seen at once, without a question.
    """

    def __init__(
        self,
        missing: Callable[[], str | None],
        ask: Callable[[], Verdict],
        clock: Callable[[], float],
        cache_s: float = CACHE_S,
    ) -> None:
        self._missing = missing
        self._ask = ask
        self._clock = clock
        self._cache_s = cache_s
        self._lock = threading.Lock()
        self._known: Verdict | None = None
        self._known_s = 0.0

    def check(self) -> Verdict:
        """The health now."""
        missing = self._missing()
        if missing is not None:
            with self._lock:
                self._known = None  # what was answered before the death says nothing about after it
            return Verdict(False, missing)
        with self._lock:
            if self._known is None or self._clock() - self._known_s >= self._cache_s:
                self._known = self._ask()
                self._known_s = self._clock()
            return self._known


def missing_stage(plan: Plan, is_alive: Callable[[str], bool]) -> str | None:
    """What a request cannot do without and has no living process; None when all is there."""
    if not is_alive(FRONT):
        return f"{FRONT} is not alive"
    for stage, replicas in (("encoder", plan.encoders), ("decoder", plan.decoders)):
        if not any(is_alive(replica.name) for replica in replicas):
            return f"no {stage} is alive: {', '.join(replica.name for replica in replicas)}"
    return None


def health_of(server: Server) -> Health:
    """The health of a running server."""
    address = f"{server.ports.near_host}:{server.ports.grpc}"
    picture = grey_picture()
    return Health(
        missing=lambda: missing_stage(
            server.plan, lambda name: is_beating(pulse_path(server.boot_id, name), time.monotonic())
        ),
        ask=lambda: _ask(address, picture),
        clock=time.monotonic,
    )


def grey_picture() -> bytes:
    """A small PNG file to ask about."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 32), (128, 128, 128)).save(file, "PNG")
    return file.getvalue()


def _ask(address: str, picture: bytes) -> Verdict:
    try:
        with RelayClient(address) as client:
            client.ask("What is this?", images=[picture], max_tokens=1, priority=MOST_URGENT, deadline_s=ASK_TIMEOUT_S)
    except Overloaded as error:  # a busy server that was taken out would only leave more to the others
        return Verdict(True, f"busy: {error}")
    except RelayClientError as error:
        return Verdict(False, str(error))
    return Verdict(True, "answers")


class Probes:
    """The health port of one server. Until `attach` it says that the server loads."""

    def __init__(self, host: str, port: int) -> None:
        """Listens; a port of 0 is any free one.

        Raises:
            PortBusy: the port is taken, or the address is not of this machine.
        """
        self._health: Health | None = None
        self._drain: Callable[[], bool] = lambda: True
        self._is_leaving = threading.Event()
        try:
            self._server = _HttpServer((host, port), self)
        except OSError as error:
            advice = "give another with --health-port"
            raise PortBusy(f"health port {port} on {host}: {error.strerror}; {advice}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)
        self._thread.start()

    def attach(self, health: Health, drain: Callable[[], bool]) -> None:
        """The server has loaded. `drain` refuses new requests and says whether the running ones ended."""
        self._health, self._drain = health, drain

    def leave(self) -> None:
        """Not ready from now on."""
        self._is_leaving.set()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, options: dict[str, list[str]]) -> tuple[int, str]:
        """Status and text for a request."""
        if path == "/health/ready":
            return self._ready()
        if path == "/health/live":
            return self._live()
        if path == "/drain":
            return self._leave(options.get("after_s", ["0"])[0])
        return 404, "there are /health/ready, /health/live and /drain"

    def _ready(self) -> tuple[int, str]:
        if self._is_leaving.is_set():
            return 503, "draining"
        if self._health is None:
            return 503, "loading"
        verdict = self._health.check()
        return (200 if verdict.is_working else 503), verdict.detail

    def _live(self) -> tuple[int, str]:
        if self._is_leaving.is_set() or self._health is None:
            return 200, "draining" if self._is_leaving.is_set() else "loading"
        return self._ready()

    def _leave(self, after_s: str) -> tuple[int, str]:
        try:
            seconds = float(after_s)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= LONGEST_LEAVE_S:
            return 400, f"after_s must be 0 to {LONGEST_LEAVE_S:g} seconds, not {after_s}"
        self.leave()
        logger.warning("told to drain: not ready from now on, refusing in %g s", seconds)
        time.sleep(seconds)
        return (200, "drained") if self._drain() else (503, "some requests did not finish in time")


class _HttpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], probes: Probes) -> None:
        self.probes = probes
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = 10  # for a request to arrive

    def do_GET(self) -> None:
        """Answers one probe."""
        url = urllib.parse.urlsplit(self.path)
        status, detail = self.server.probes.answer(url.path, urllib.parse.parse_qs(url.query))
        body = json.dumps({"status": "ok" if status == 200 else "failed", "detail": detail}).encode() + b"\n"
        with contextlib.suppress(ConnectionError):  # a probe that did not wait
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Nothing: probes come all the time."""


@contextlib.contextmanager
def probing(host: str, port: int | None) -> Iterator[Probes | None]:
    """A health port for as long as the block runs; None when no port is given. Raises as `Probes`."""
    if port is None:
        yield None
        return
    probes = Probes(host, port)
    try:
        yield probes
    finally:
        probes.close()
