"""The gateway as a process: listening, and stopping so that running answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

KEEP_ALIVE_S = 75  # clients give idle connections up after 5 s (httpx): closed at the same time, requests are lost
CUT_OFF_S = 2.0  # for telling the clients whose answers are cut off
DRAIN_S = 30.0  # how long running answers may take to finish


class PortBusy(OSError):
    """Somebody listens on the port that was asked for."""


def bind(host: str, port: int) -> socket.socket:
    """A socket with a port of its own, 0 being any free one; connections are refused until it is served on.

    Raises:
        PortBusy: the port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off Nagle's algorithm, which holds each chunk back, only where the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        advice = "give another with --port, or 0 for a free one"
        raise PortBusy(f"port {port} on {host}: {error.strerror}; {advice}") from error
    return listener


class GatewayServer(uvicorn.Server):
    """A uvicorn server that ends the live panels when it stops, and leaves the signals to its owner.

    `stop` may be called from any thread and from a signal handler: the first call lets running answers finish,
    the second ends them.
    """

    def __init__(self, app: FastAPI, drain_s: float = DRAIN_S) -> None:
        self._app_events = app.state.gateway.events
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,  # the edge writes one line per request
                server_header=False,
                timeout_graceful_shutdown=int(drain_s),
                lifespan="on",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    def stop(self) -> None:
        """Stop listening; see the class."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the panels, which would never end by themselves, then everything else."""
        self._app_events.close()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave running answers and the application to the end of the loop
            running = list(self.server_state.tasks)
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=CUT_OFF_S)
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: `stopping_on_signals` is for that."""
        yield


@contextlib.contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` at each SIGINT and SIGTERM; for the main thread."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(app: FastAPI, listener: socket.socket, drain_s: float = DRAIN_S) -> None:
    """Serves on `listener` until SIGINT or SIGTERM, then finishes what runs; a second signal ends it."""
    server = GatewayServer(app, drain_s)
    with listener, stopping_on_signals(server.stop):
        asyncio.run(server.serve([listener]))
