"""The client for asyncio: `AsyncRelayClient`, the twin of `client.relay.RelayClient`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.answer import Answer, Chunk, Told
from client.channel import (
    CONNECT_TIMEOUT_S,
    DEADLINE_GRACE_S,
    DEFAULT_ADDRESS,
    LINGER_S,
    address_from,
    channel_options,
)
from client.errors import Cancelled, RegionUnknown, RelayClientError, ServerError, Unavailable, from_status
from client.images import Image
from client.request import Message, Options, Request, request_from
from client.retry import Attempts
from client.shared_memory import SharedMemory
from client.transcript import Transcript
from client.wire import Reply, message_from, reply_from


class AsyncRelayClient:
    """A connection to one server, for the tasks of one event loop; see `RelayClient` for what is the same."""

    def __init__(
        self,
        url: str = DEFAULT_ADDRESS,
        *,
        model: str = "llava",
        retries: int = 0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        deadline_grace_s: float = DEADLINE_GRACE_S,
        shared_memory_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: random.Random | None = None,
    ) -> None:
        self.address = address_from(url)
        self._model = model
        self._retries = retries
        self._connect_timeout_s = connect_timeout_s
        self._deadline_grace_s = deadline_grace_s
        self._clock = clock
        self._sleep = sleep
        self._chance = chance or random.Random()
        self._channel: grpc.aio.Channel | None = None
        self._shared_memory_key = shared_memory_key
        self._shared: SharedMemory | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; streams still open are cancelled. Another request opens a new one."""
        shared, self._shared = self._shared, None
        if shared is not None:
            if shared.is_registered:
                with contextlib.suppress(grpc.RpcError):  # a server that is gone has forgotten it
                    await self._stub().SystemSharedMemoryUnregister(
                        shared.farewell(), timeout=self._connect_timeout_s, metadata=shared.metadata
                    )
            shared.close()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def is_ready(self) -> bool:
        """Whether the server answers and has its model loaded; False also when nothing answers."""
        request = service_pb2.ModelReadyRequest(name=self._model)
        try:
            response = await self._stub().ModelReady(request, timeout=self._connect_timeout_s)
        except grpc.RpcError:
            return False
        return bool(response.ready)

    async def ask(
        self,
        question: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        images: Iterable[Image] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """The whole answer, once it is complete; cancelling the task cancels the request.

        Raises:
            RelayClientError: see `client.errors`; `InvalidRequest` before anything is sent where possible.
        """
        async with self.stream(question, messages=messages, images=images, **options) as stream:
            async for _ in stream:
                pass
            return stream.answer

    def stream(
        self,
        question: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        images: Iterable[Image] = (),
        on_progress: Told | None = None,
        **options: Unpack[Options],
    ) -> AsyncAnswerStream:
        """The answer as it comes; reads the images now, and sends the request when the stream is entered.

        `on_progress` is told how far the request is before its first text.

        Raises:
            InvalidRequest: the request cannot be sent as it is.
        """
        request = request_from(question, messages, images, **options)
        if on_progress is not None:
            request = replace(request, return_progress=True)
        attempts = Attempts(request, self._retries, self._clock, self._chance)
        return AsyncAnswerStream(self._call, attempts, self.address, self._clock, self._sleep, on_progress)

    def _stub(self) -> service_pb2_grpc.GRPCInferenceServiceStub:
        if self._channel is None:  # not in __init__: a channel belongs to the event loop that runs it
            options = channel_options(self._connect_timeout_s)
            self._channel = grpc.aio.insecure_channel(self.address, options=options)
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def _call(self, request: Request, tells_again: bool = False) -> grpc.aio.StreamStreamCall:
        if self._shared is None and self._shared_memory_key is not None:
            self._shared = SharedMemory(self._shared_memory_key)
        shared = self._shared
        piece = None if shared is None else shared.place(request.images)
        if shared is None or piece is None:
            return self._send(message_from(request, self._model), request)
        try:
            if tells_again or not shared.is_registered:
                await self._register(shared)
            call = self._send(message_from(request, self._model, piece), request)
        except BaseException:
            shared.free(piece)
            raise
        call.add_done_callback(lambda _: shared.free(piece))
        return call

    def _send(self, message: service_pb2.ModelInferRequest, request: Request) -> grpc.aio.StreamStreamCall:
        timeout_s = None if request.deadline_s is None else request.deadline_s + self._deadline_grace_s
        return self._stub().ModelStreamInfer(iter([message]), timeout=timeout_s, metadata=request.metadata)

    async def _register(self, shared: SharedMemory) -> None:
        """Tells the server of the region."""
        try:
            await self._stub().SystemSharedMemoryRegister(
                shared.registration(), timeout=self._connect_timeout_s, metadata=shared.metadata
            )
        except grpc.RpcError as error:
            shared.note_refusal(error.code().name, error.details() or "", self.address)
        shared.is_registered = True


class AsyncAnswerStream:
    """One answer, chunk by chunk: `async with`, then `async for`; leaving it early cancels the request."""

    def __init__(
        self,
        open_call: Callable[[Request, bool], Awaitable[grpc.aio.StreamStreamCall]],
        attempts: Attempts,
        address: str,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        on_progress: Told | None = None,
    ) -> None:
        self._open_call = open_call
        self._attempts = attempts
        self._address = address
        self._sleep = sleep
        self._transcript = Transcript(clock, on_progress)
        self._call: grpc.aio.StreamStreamCall = None  # set on entering
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._transcript.start()
        self._call = await self._open_call(self._attempts.next_request(), False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._transcript.is_ending and not self._is_closed:
            await self._drain()
        self.close()

    @property
    def answer(self) -> Answer:
        """What has arrived so far; complete once iterating has ended by itself."""
        return self._transcript.answer

    def close(self) -> None:
        """Cancel the request unless its answer is complete."""
        if not self._is_closed:
            self._is_closed = True
            if self._call is not None:
                self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._call is None:
            raise RuntimeError("enter the stream first: async with client.stream(...) as stream")
        while not self._transcript.is_final:
            try:
                chunk = self._transcript.add(await self._read())
            except RelayClientError as error:
                await self._drain()
                await self._try_again(error)
            except BaseException:
                self.close()
                raise
            else:
                if chunk is not None:
                    return chunk
        await self._drain()
        raise StopAsyncIteration

    async def _read(self) -> Reply:
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            if _is_task_cancelled():
                raise
            raise self._cancelled() from None
        except grpc.RpcError as error:
            if self._is_closed:
                raise self._cancelled() from None
            status, details = error.code().name, error.details() or ""
            raise from_status(status, details, self._address, self._transcript.has_begun) from None
        if response is grpc.aio.EOF:
            raise ServerError(f"the server at {self._address} ended the answer without its final response")
        return reply_from(response)

    def _cancelled(self) -> Cancelled:
        if self._is_closed:
            return Cancelled("the stream was closed before the answer was complete")
        return Cancelled("the request was cancelled")

    async def _try_again(self, error: RelayClientError) -> None:
        if not isinstance(error, Unavailable) or self._transcript.has_begun or self._is_closed:
            raise error
        await self._sleep(self._attempts.pause_after(error))
        self._call = await self._open_call(self._attempts.next_request(), isinstance(error, RegionUnknown))

    async def _drain(self) -> None:
        """Read on to the end of the call, which is near; see `AnswerStream._drain`."""
        try:
            async with asyncio.timeout(LINGER_S):
                while not self._call.done() and await self._call.read() is not grpc.aio.EOF:
                    pass
        except (TimeoutError, grpc.RpcError):
            pass  # what the call was for has been told before
        except asyncio.CancelledError:
            if _is_task_cancelled():
                raise
        finally:
            self._call.cancel()  # changes nothing at a call that has ended


def _is_task_cancelled() -> bool:
    """Whether an `asyncio.CancelledError` is meant for the task.

    grpc raises it also when the call was cancelled, here or by the server, and the task was not.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
