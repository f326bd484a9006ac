"""What happens in the gateway, told to whoever watches the live panel.

Events are small JSON objects: what was asked and answered is never among them.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping

KEPT_REQUESTS = 30  # shown to a watcher that comes later
QUEUED_EVENTS = 256  # for one watcher; a slower one loses the oldest
MAX_WATCHERS = 64


class Watcher:
    """One open panel: its events, in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str | None] = asyncio.Queue(QUEUED_EVENTS)

    def put(self, event: str | None) -> None:
        """Append an event; None is the last. A full queue loses its oldest one."""
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(event)

    async def next(self) -> str | None:
        """The next event as SSE text, or None at the end."""
        return await self._queue.get()


class Events:
    """Passes events on to the watchers; used by one event loop only."""

    def __init__(self, pipeline: Mapping[str, object] | None = None) -> None:
        self._pipeline = pipeline
        self._watchers: set[Watcher] = set()
        self._requests: OrderedDict[str, Mapping[str, object]] = OrderedDict()
        self._is_closed = False

    @property
    def has_watchers(self) -> bool:
        """Whether anybody watches; gauges are read only then."""
        return bool(self._watchers)

    @property
    def has_room(self) -> bool:
        """Whether one more may watch."""
        return len(self._watchers) < MAX_WATCHERS and not self._is_closed

    def watch(self) -> Watcher:
        """A watcher that begins with the pipeline and the latest requests; give it back with `leave`."""
        watcher = Watcher()
        if self._pipeline is not None:
            watcher.put(_sse("pipeline", self._pipeline))
        for request in self._requests.values():
            watcher.put(_sse("request", request))
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Forget a watcher."""
        self._watchers.discard(watcher)

    def tell_request(self, key: str, request: Mapping[str, object]) -> None:
        """A request's new state, which replaces what was known of it."""
        self._requests[key] = request
        self._requests.move_to_end(key)
        while len(self._requests) > KEPT_REQUESTS:
            self._requests.popitem(last=False)
        self._tell("request", request)

    def tell_gauges(self, gauges: Mapping[str, object]) -> None:
        """The gauges as they are now."""
        self._tell("gauges", gauges)

    def close(self) -> None:
        """End every watcher's stream: the gateway is stopping."""
        self._is_closed = True
        for watcher in self._watchers:
            watcher.put(None)

    def _tell(self, kind: str, data: Mapping[str, object]) -> None:
        if self._watchers:
            event = _sse(kind, data)
            for watcher in self._watchers:
                watcher.put(event)


def _sse(kind: str, data: Mapping[str, object]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
