"""One answer over HTTP: first token before the 200, then the stream; a client that goes away cancels it.

receive ──▶ watch: until the client is gone ──┐ whichever is first;
client library ──▶ work: token, token, end ───┘ the other is cancelled, and with the work the request upstream
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from client.answer import Chunk
from client.errors import RelayClientError
from client.gateway.failure import Failure, failure_from
from client.gateway.record import Record
from client.gateway.wording import Wording
from client.relay_async import AsyncAnswerStream

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the chunks back
}
_JSON_HEADERS = {"Content-Type": "application/json"}


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class AnswerResponse(Response):
    """The answer in `stream`, which it enters and closes, in the words of `wording`."""

    def __init__(
        self, stream: AsyncAnswerStream, wording: Wording, record: Record, is_streaming: bool, includes_usage: bool
    ) -> None:
        super().__init__()
        self._stream = stream
        self._wording = wording
        self._record = record
        self._is_streaming = is_streaming
        self._includes_usage = includes_usage
        self._failure: Failure | None = None
        self._has_begun = False  # the status is out: an error can only come as an event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer; returns also when the client has gone away.

        When this task is cancelled, which the gateway does when it waits no longer, the client is told.
        """
        work = asyncio.create_task(self._answer(send))
        watch = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_complete, is_gone = work.done(), watch.done()
            work.cancel()
            watch.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
            if not is_complete and not is_gone:
                self._failure = Failure(503, "the gateway is stopping", code="unavailable")
                await self._send_failure(send, self._failure)
            self._record.end(self._stream.answer, self._failure, is_disconnect=is_gone and not is_complete)
        if is_complete:
            work.result()

    async def _answer(self, send: Send) -> None:
        try:
            async with self._stream as stream:
                first = await anext(stream, None)
                self._record.note_first(stream.answer)
                if self._is_streaming:
                    await self._send_stream(send, first)
                else:
                    await self._send_whole(send)
        except RelayClientError as error:
            self._failure = failure_from(error)
            await self._send_failure(send, self._failure)

    async def _send_whole(self, send: Send) -> None:
        async for _ in self._stream:
            self._tell_news()
        await self._begin(send, 200, _JSON_HEADERS)
        await _send(send, _line(self._wording.whole(self._stream.answer)), is_last=True)

    async def _send_stream(self, send: Send, first: Chunk | None) -> None:
        await self._begin(send, 200, SSE_HEADERS)
        opening = self._wording.opening()
        if opening is not None:
            await self._send_event(send, opening)
        if first is not None:
            await self._send_chunk(send, first)
            async for chunk in self._stream:
                self._tell_news()
                await self._send_chunk(send, chunk)
        if self._includes_usage:
            await self._send_event(send, self._wording.counts(self._stream.answer))
        await _send(send, "data: [DONE]\n\n", is_last=True)

    def _tell_news(self) -> None:
        if self._record.wants_news:
            self._record.note_news(self._stream.answer)

    async def _send_chunk(self, send: Send, chunk: Chunk) -> None:
        if chunk.text or chunk.finish_reason or chunk.logprobs:  # half a character has no text yet
            await self._send_event(send, self._wording.chunk(chunk))

    async def _send_failure(self, send: Send, failure: Failure) -> None:
        if self._has_begun:
            await _send(send, f"data: {failure.json()}\n\n", is_last=True)
        else:
            await self._begin(send, failure.status, {**_JSON_HEADERS, **failure.headers})
            await _send(send, failure.json(), is_last=True)

    async def _begin(self, send: Send, status: int, headers: Mapping[str, str]) -> None:
        self._has_begun = True
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send_event(self, send: Send, event: Mapping[str, object]) -> None:
        await _send(send, f"data: {_line(event)}\n\n")


async def _send(send: Send, text: str, is_last: bool = False) -> None:
    with contextlib.suppress(OSError):  # the connection has just broken: the watch will see it
        await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})


def _line(value: Mapping[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
