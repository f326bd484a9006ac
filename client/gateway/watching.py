"""`/scheduler/events`: the live panel's stream, for as long as its browser listens."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from client.gateway.events import Events, Watcher
from client.gateway.response import SSE_HEADERS, until_gone

KEEP_ALIVE_S = 15.0  # proxies close what is silent for long


class EventsResponse(Response):
    """Sends events until the client goes away or the gateway stops."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        headers = [(name.lower().encode(), value.encode()) for name, value in SSE_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        watcher = self._events.watch()
        pass_on = asyncio.create_task(_pass_on(watcher, send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({pass_on, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._events.leave(watcher)
            pass_on.cancel()
            gone.cancel()
            await asyncio.gather(pass_on, gone, return_exceptions=True)


async def _pass_on(watcher: Watcher, send: Send) -> None:
    await _send(send, "retry: 1000\n\n")
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                event = await watcher.next()
        except TimeoutError:
            event = ": still here\n\n"
        if event is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await _send(send, event)


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
