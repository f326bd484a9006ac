"""Whether the whole journey works: a picture is looked at and one token comes back."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass

from client.errors import Overloaded, RelayClientError
from client.relay_async import AsyncRelayClient

MOST_URGENT = -100
# 32 x 32 grey pixels, a PNG.
_PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAFklEQVR42mNoIAAYRhWMKhhVMFIVAABCAAAfN5c2AAAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True, slots=True)
class Health:
    """`status` is `ok`, `busy` (works, but has no room now) or `failed`, and `detail` says why."""

    status: str
    detail: str | None = None

    @property
    def is_working(self) -> bool:
        """Whether requests can be sent here; a busy server would only lose its place for being busy."""
        return self.status != "failed"


class Canary:
    """Asks the server a question now and then; several who want to know share one answer."""

    def __init__(self, client: AsyncRelayClient, cache_s: float, timeout_s: float, clock: Callable[[], float]) -> None:
        self._client = client
        self._cache_s = cache_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._known: Health | None = None
        self._known_s = 0.0

    async def health(self) -> Health:
        """The health as it was at most `cache_s` ago."""
        async with self._lock:
            if self._known is None or self._clock() - self._known_s >= self._cache_s:
                self._known = await self._ask()
                self._known_s = self._clock()
            return self._known

    async def _ask(self) -> Health:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.ask(
                    "What is this?",
                    images=[_PICTURE],
                    max_tokens=1,
                    priority=MOST_URGENT,
                    deadline_s=self._timeout_s,
                )
        except TimeoutError:
            return Health("failed", f"no answer within {self._timeout_s:g} s")
        except Overloaded as error:
            return Health("busy", str(error))
        except RelayClientError as error:
            return Health("failed", str(error))
        return Health("ok")
