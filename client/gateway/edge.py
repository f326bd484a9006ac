"""The first to see a request: its id, its key, its size; counted and logged on the way out.

The whole body is read here, within bounds, so that whatever comes after sees a complete one, and an abandoned
upload never costs more than its memory.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.gateway.failure import Failure, no_key, too_busy
from client.gateway.metrics import GatewayMetrics
from client.gateway.settings import MIB, Settings

logger = logging.getLogger(__name__)

COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
_ENDPOINTS = (*COMPLETIONS, "/v1/models", "/health", "/health/live", "/metrics", "/scheduler/events", "/")
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class ClientGone(Exception):
    """The connection closed while its body was read."""


class BodyRefused(Exception):
    """The body is not read to its end; the failure says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True)
class Memory:
    """The bytes that all requests may hold together, and do."""

    limit: int
    num_bytes: int = 0


class Held:
    """What one request holds of the memory: its body, and the images that were fetched for it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Hold so many more.

        Raises:
            BodyRefused: there is no room for them.
        """
        self.num_bytes += num_bytes
        self._memory.num_bytes += num_bytes
        if self._memory.num_bytes > self._memory.limit:
            raise BodyRefused(too_busy("the bodies of other requests fill the memory set aside for them"))

    def give_back(self) -> None:
        """Hold nothing any more."""
        self._memory.num_bytes -= self.num_bytes
        self.num_bytes = 0


class Edge:
    """Wraps the application. Owns the count of requests, and the memory that they hold."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: GatewayMetrics, clock: Callable[[], float]) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._keys = tuple(key.encode() for key in settings.api_keys)
        self._num_completions = 0
        self._memory = Memory(settings.max_bodies_mib * MIB)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, request_id = self._clock(), _request_id(scope)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "traceparent": _traceparent(scope)}
        status = 499

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._let_in(scope, receive, send_on)
        except ClientGone:
            pass
        except asyncio.CancelledError:  # only when the gateway stops and waits no longer; this is the task's top
            logger.warning("%s cut off: the gateway is stopping", request_id)
        except Exception:  # answered further out, with a 500
            status = 500
            raise
        finally:
            path = scope["path"]
            self._metrics.requests.labels(_endpoint(path), str(status)).inc()
            level = logging.DEBUG if path.startswith(("/health", "/metrics")) else logging.INFO
            seconds = self._clock() - began_s
            logger.log(level, "%s %s %r %d in %.3f s", request_id, scope["method"], path, status, seconds)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = self._check_key(scope)
        is_completion = scope["path"] in COMPLETIONS and scope["method"] == "POST"
        if failure is None and is_completion and self._num_completions >= self._settings.max_in_flight:
            failure = too_busy(f"{self._num_completions} requests are in flight; no room for more")
        if failure is not None:
            await _refuse(failure, send)
            return
        self._num_completions += is_completion
        held = scope["state"]["held"] = Held(self._memory)
        try:
            body = await self._read(scope, receive, held)
            await self._app(scope, _replay(body, receive), send)
        except BodyRefused as refused:
            await _refuse(refused.failure, send)
        finally:
            self._num_completions -= is_completion
            held.give_back()

    def _check_key(self, scope: Scope) -> Failure | None:
        if not self._keys or not scope["path"].startswith(("/v1/", "/scheduler/")):
            return None
        given = _header(scope, b"authorization")
        kind, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), each) for each in self._keys]  # all of them: constant time
        return None if kind.lower() == b"bearer" and any(matches) else no_key(bool(given))

    async def _read(self, scope: Scope, receive: Receive, held: Held) -> bytes:
        limit = self._settings.max_body_mib * MIB
        try:
            announced = int(_header(scope, b"content-length") or b"0")
        except ValueError:
            raise BodyRefused(Failure(400, "Content-Length is not a number")) from None
        if announced > limit:
            raise BodyRefused(self._too_large())
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    parts.append(part)
                    held.take(len(part))
                    if held.num_bytes > limit:
                        raise BodyRefused(self._too_large())
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            seconds = self._settings.body_timeout_s
            raise BodyRefused(Failure(408, f"the body did not arrive within {seconds:g} s")) from None

    def _too_large(self) -> Failure:
        return Failure(413, f"the body is too large; at most {self._settings.max_body_mib} MiB are allowed")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what the connection says."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def next_message() -> Message:
        message = next(messages, None)
        return await receive() if message is None else message

    return next_message


async def _refuse(failure: Failure, send: Send) -> None:
    headers = {"Content-Type": "application/json", "Connection": "close", **failure.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": failure.status, "headers": raw})
    await send({"type": "http.response.body", "body": failure.json().encode()})


def _request_id(scope: Scope) -> str:
    """The client's own id if it is a plain one, else a new one."""
    given = _header(scope, b"x-request-id").decode("latin-1")
    return given if given.isascii() and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _traceparent(scope: Scope) -> str:
    given = _header(scope, b"traceparent").decode("latin-1")
    return given if _TRACEPARENT.fullmatch(given) else ""


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


def _endpoint(path: str) -> str:
    """A label for metrics; few different ones, whatever is asked for."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{id}"
    return path if path in _ENDPOINTS else "other"
