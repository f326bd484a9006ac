"""The client for ordinary code: `RelayClient` and the stream it lends."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack

import grpc
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


class RelayClient:
    """A connection to one server; may be shared by threads, each with streams of its own.

    `retries` is how often a request refused for want of room is sent again, as long as nothing of its answer
    has arrived; the pauses double and are never shorter than the server's hint. The connection is made when
    the first request is sent. `shared_memory_key`, for a server on this machine that was started with the same
    one: large images go through shared memory.
    """

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
        sleep: Callable[[float], None] = time.sleep,
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
        self._channel = grpc.insecure_channel(self.address, options=channel_options(connect_timeout_s))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._shared = None if shared_memory_key is None else SharedMemory(shared_memory_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; streams still open are cancelled."""
        shared, self._shared = self._shared, None
        if shared is not None:
            if shared.is_registered:
                with contextlib.suppress(grpc.RpcError):  # a server that is gone has forgotten it
                    self._stub.SystemSharedMemoryUnregister(
                        shared.farewell(), timeout=self._connect_timeout_s, metadata=shared.metadata
                    )
            shared.close()
        self._channel.close()

    def is_ready(self) -> bool:
        """Whether the server answers and has its model loaded; False also when nothing answers."""
        request = service_pb2.ModelReadyRequest(name=self._model)
        try:
            return bool(self._stub.ModelReady(request, timeout=self._connect_timeout_s).ready)
        except grpc.RpcError:
            return False

    def ask(
        self,
        question: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        images: Iterable[Image] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """The whole answer, once it is complete.

        Raises:
            RelayClientError: see `client.errors`; `InvalidRequest` before anything is sent where possible.
        """
        with self.stream(question, messages=messages, images=images, **options) as stream:
            for _ in stream:
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
    ) -> AnswerStream:
        """The answer as it comes; reads the images now, and sends the request when the stream is entered.

        `on_progress` is told how far the request is before its first text.

        Raises:
            InvalidRequest: the request cannot be sent as it is.
        """
        request = request_from(question, messages, images, **options)
        if on_progress is not None:
            request = replace(request, return_progress=True)
        attempts = Attempts(request, self._retries, self._clock, self._chance)
        return AnswerStream(self._call, attempts, self.address, self._clock, self._sleep, on_progress)

    def _call(self, request: Request, tells_again: bool = False) -> grpc.Call:
        shared = self._shared
        piece = None if shared is None else shared.place(request.images)
        if shared is None or piece is None:
            return self._send(message_from(request, self._model), request)
        try:
            if tells_again or not shared.is_registered:
                self._register(shared)
            call = self._send(message_from(request, self._model, piece), request)
        except BaseException:
            shared.free(piece)
            raise
        if not call.add_callback(lambda: shared.free(piece)):  # it has ended already
            shared.free(piece)
        return call

    def _send(self, message: service_pb2.ModelInferRequest, request: Request) -> grpc.Call:
        # Sending no more than this one request closes our side at once, so that the server can end the call
        # after its final response, and does not wait for us when it shuts down.
        timeout_s = None if request.deadline_s is None else request.deadline_s + self._deadline_grace_s
        return self._stub.ModelStreamInfer(iter([message]), timeout=timeout_s, metadata=request.metadata)

    def _register(self, shared: SharedMemory) -> None:
        """Tells the server of the region."""
        try:
            self._stub.SystemSharedMemoryRegister(
                shared.registration(), timeout=self._connect_timeout_s, metadata=shared.metadata
            )
        except grpc.RpcError as error:
            shared.note_refusal(error.code().name, error.details() or "", self.address)
        shared.is_registered = True


class AnswerStream:
    """One answer, chunk by chunk: enter it, then iterate; leaving it early cancels the request.

    To be iterated by one thread. `close` may be called by any; the iterating one then gets `Cancelled`.
    """

    def __init__(
        self,
        open_call: Callable[[Request, bool], grpc.Call],
        attempts: Attempts,
        address: str,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        on_progress: Told | None = None,
    ) -> None:
        self._open_call = open_call
        self._attempts = attempts
        self._address = address
        self._sleep = sleep
        self._transcript = Transcript(clock, on_progress)
        self._call: grpc.Call = None  # set on entering
        self._is_closed = False

    def __enter__(self) -> Self:
        self._transcript.start()
        self._call = self._open_call(self._attempts.next_request(), False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._transcript.is_ending and not self._is_closed:
            self._drain()
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

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._call is None:
            raise RuntimeError("enter the stream first: with client.stream(...) as stream")
        while not self._transcript.is_final:
            try:
                chunk = self._transcript.add(self._read())
            except RelayClientError as error:
                self._drain()
                self._try_again(error)
            except BaseException:
                self.close()
                raise
            else:
                if chunk is not None:
                    return chunk
        self._drain()
        raise StopIteration

    def _read(self) -> Reply:
        try:
            response = next(self._call, None)
        except grpc.RpcError as error:
            if self._is_closed:
                raise Cancelled("the stream was closed before the answer was complete") from None
            raise self._failure(error) from None
        if response is None:
            raise ServerError(f"the server at {self._address} ended the answer without its final response")
        return reply_from(response)

    def _failure(self, error: grpc.RpcError) -> RelayClientError:
        return from_status(error.code().name, error.details() or "", self._address, self._transcript.has_begun)

    def _try_again(self, error: RelayClientError) -> None:
        if not isinstance(error, Unavailable) or self._transcript.has_begun or self._is_closed:
            raise error
        self._sleep(self._attempts.pause_after(error))
        self._call = self._open_call(self._attempts.next_request(), isinstance(error, RegionUnknown))

    def _drain(self) -> None:
        """Read on to the end of the call, which is near; cancel it when it is not there in `LINGER_S`.

        A cancel just then is what Triton 2.51 does not bear: it keeps the request for ever, or crashes.
        """
        if self._call.is_active():
            too_late = threading.Timer(LINGER_S, self._call.cancel)
            too_late.start()
            try:
                for _ in self._call:
                    pass
            except grpc.RpcError:
                pass  # what the call was for has been told before
            finally:
                too_late.cancel()
