"""`vlm-relay up`: the server and the gateway in front of it, together until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from client.gateway.app import create_app
from client.gateway.listening import GatewayServer, bind, stopping_on_signals
from client.gateway.pipeline import pipeline_from
from client.gateway.settings import Settings
from launcher.process import ServerFailed
from launcher.serve import Say, running
from launcher.server import Server
from scheduler.plan import Plan

WATCH_S = 0.2


class _Stop:
    """What Ctrl-C does: first running answers finish, the second time they end; later it interrupts."""

    def __init__(self) -> None:
        self.event = threading.Event()  # ends the wait for a server that loads
        self.gateway: GatewayServer | None = None

    def __call__(self) -> None:
        if self.gateway is not None:
            self.gateway.stop()
        elif self.event.is_set():
            raise KeyboardInterrupt
        self.event.set()


def up(
    plan: Plan,
    ports: tuple[str, int, int, int],
    gateway_address: tuple[str, int],
    settings_for: Callable[[str, str], Settings],
    variables: Mapping[str, str],
    say: Say,
) -> int:
    """Serves until SIGINT, SIGTERM or the server's death; the exit code.

    `settings_for` gives the gateway's settings for the server's gRPC address and its metrics' URL.

    Raises:
        ServerFailed: the server could not start, or stopped by itself.
        PortBusy: a port is taken.
    """
    stop = _Stop()
    with (
        bind(*gateway_address) as listener,
        stopping_on_signals(stop),
        running(plan, ports, variables, say, stopping=stop.event) as server,
    ):
        if stop.event.is_set():
            return 0
        at = server.ports
        settings = settings_for(f"{at.host}:{at.grpc}", f"http://{at.host}:{at.metrics}/metrics")
        settings = replace(settings, pipeline=pipeline_from(plan.model_dump_json()))
        stop.gateway = GatewayServer(create_app(settings), plan.limits.drain_s)
        host, port = listener.getsockname()[:2]
        say(f"gateway on http://{host}:{port}{'' if settings.api_keys else ', without API keys'}")
        asyncio.run(_serve(stop.gateway, listener, server))
        stop.gateway = None
        say("gateway stopped")
        if not stop.event.is_set():
            raise ServerFailed("tritonserver stopped by itself; see its last lines above")
    return 0


async def _serve(gateway: GatewayServer, listener: socket.socket, server: Server) -> None:
    watch = asyncio.create_task(_stop_with(server, gateway))
    try:
        await gateway.serve([listener])
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def _stop_with(server: Server, gateway: GatewayServer) -> None:
    while server.is_running():
        await asyncio.sleep(WATCH_S)
    gateway.stop()
