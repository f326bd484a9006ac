"""The life of a request: admit, decide, encode, decode, relay; and the watch over all of them.

    accept ─▶ waiting room ─▶ one thread each: tokens ─▶ encode ─▶ decode ─▶ reply, reply, final
                  │                               │
                  └───── the watch: cancels, deadlines, silence ─────▶ final

A request is ended exactly once, by whoever comes first: its own thread or the watch. A thread whose stage died
may hang in Triton for ever; the watch has then ended its request, and nobody waits for the thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Protocol

from python_backend.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidImage,
    InvalidRequest,
    Overloaded,
    PeerGone,
    RelayError,
)
from python_backend.generate import GenerateRequest
from python_backend.metrics import Meter
from python_backend.prompt import Prompt, PromptBuilder
from python_backend.request import SamplingParameters
from scheduler.admission import WaitingRoom
from scheduler.profile import LimitsTable
from scheduler.routing import Decision, Load, decide

logger = logging.getLogger(__name__)

WATCH_S = 0.02  # deadlines are kept to within this
CANCEL_POLL_S = 0.1  # asking Triton whether a client is gone costs 34 us


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the decoder gave since the last one."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[Mapping[str, object], ...] = ()
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """What the decoder is asked for."""

    request_id: str
    token_ids: tuple[int, ...]
    handles: tuple[bytes, ...]
    sampling: SamplingParameters
    deadline_s: float | None  # on the machine's monotonic clock


class Stages(Protocol):
    """The two stages, by replica name. Raises `RelayError` where a stage refuses or is gone."""

    def encode(self, encoder: str, image: bytes) -> bytes:
        """A handle, with a lease."""

    def decode(self, decoder: str, job: DecodeJob) -> Iterator[Chunk]:
        """The answer as it comes; the last chunk has a finish reason."""

    def cancel(self, decoder: str, request_id: str) -> None:
        """Stops a generation; nothing if it has ended."""

    def release(self, handle: bytes) -> None:
        """Gives a lease back; nothing if it was given back already."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One response to the client. A streaming client gets many, another client one."""

    request: GenerateRequest
    prompt: Prompt
    chunk: Chunk
    decision: Decision | None  # on the first reply only


class Client(Protocol):
    """The other end of a request."""

    def reply(self, reply: Reply, is_last: bool) -> None:
        """Sends one response, with the final flag if it is the last."""

    def fail(self, error: RelayError) -> None:
        """Sends an error with the final flag."""

    def is_cancelled(self) -> bool:
        """Whether nobody listens any more."""


@dataclass(slots=True, eq=False)
class Stream:
    """One accepted request. `lock` guards `is_ended` and every word to the client."""

    id: str
    request: GenerateRequest
    client: Client
    arrived_s: float
    deadline_s: float | None
    progress_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_ended: bool = False
    is_serving: bool = False
    decision: Decision | None = None
    decoding_on: str | None = None
    handles: list[bytes] = field(default_factory=list)
    first_text_s: float | None = None


class Relay:
    """Serves requests through the stages. Its methods may be called from any thread."""

    def __init__(
        self,
        stages: Stages,
        prompts: PromptBuilder,
        encoders: tuple[str, ...],
        decoders: tuple[str, ...],
        limits: LimitsTable,
        meter: Meter,
        clock: Callable[[], float],
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stages = stages
        self._prompts = prompts
        self._limits = limits
        self._meter = meter
        self._clock = clock
        self._is_draining = is_draining
        self._lock = threading.Lock()  # guards the room, the streams in flight and the loads
        self._room: WaitingRoom[Stream] = WaitingRoom(limits.max_waiting + 1, limits.ageing_s)
        self._serving: set[Stream] = set()
        self._images = dict.fromkeys(encoders, 0)
        self._tokens = dict.fromkeys(decoders, 0)
        self._fan_out = ThreadPoolExecutor(max_workers=64, thread_name_prefix="encode")
        self._serials = itertools.count(1)
        self._is_closed = threading.Event()
        self._watch = threading.Thread(target=self._keep_watch, name="watch", daemon=True)
        self._watch.start()

    def num_in_flight(self) -> int:
        """Requests being served or waiting."""
        with self._lock:
            return len(self._serving) + len(self._room)

    def accept(self, request: GenerateRequest, client: Client) -> None:
        """Takes responsibility for a request: it will be ended, exactly once.

        A full house or a draining server ends it here, with `Overloaded`.
        """
        now = self._clock()
        deadline_s = None if request.deadline_s is None else now + request.deadline_s
        stream = Stream(f"{now:.6f}-{next(self._serials)}", request, client, now, deadline_s, now)
        if self._is_draining():
            self._end(stream, Overloaded("the server is stopping and takes no new requests", 5.0))
            return
        with self._lock:
            is_full = len(self._room) >= self._limits.max_waiting and not self._has_place()
            if not is_full:
                self._room.enter(stream, request.priority, deadline_s, now)
        if is_full:
            limits = self._limits
            text = f"{limits.max_in_flight} requests are in flight and {limits.max_waiting} wait; no room for more"
            self._end(stream, Overloaded(text))
            return
        self._dispatch()

    def close(self) -> None:
        """Ends every request that is left, and the watch."""
        self._is_closed.set()
        self._watch.join(timeout=5)
        with self._lock:
            left = [*self._serving, *self._room.items()]
            self._room.remove({id(stream) for stream in left})  # or an ended request's place would start it
        for stream in left:
            self._end(stream, PeerGone("the server is stopping"))
        self._fan_out.shutdown(wait=False, cancel_futures=True)

    # -- places -------------------------------------------------------------------------------------------

    def _has_place(self) -> bool:
        return len(self._serving) < self._limits.max_in_flight

    def _dispatch(self) -> None:
        """Gives free places to those who wait, most urgent first."""
        while True:
            with self._lock:
                stream = self._room.take() if self._has_place() else None
                if stream is None:
                    break
                self._serving.add(stream)
                stream.is_serving = True
                stream.progress_s = self._clock()  # waiting for a place was no silence of a stage
            threading.Thread(target=self._serve, args=(stream,), name=stream.id, daemon=True).start()
        self._report()

    def _report(self) -> None:
        with self._lock:
            serving, waiting = len(self._serving), len(self._room)
        self._meter.set("vlm_relay_in_flight_requests", serving)
        self._meter.set("vlm_relay_waiting_requests", waiting)

    # -- one request --------------------------------------------------------------------------------------

    def _serve(self, stream: Stream) -> None:
        try:
            self._run(stream)
        except RelayError as error:
            self._end(stream, error)
        except Exception as error:
            logger.exception("%s: failed", stream.id)
            self._end(stream, InternalError(f"the scheduler failed: {type(error).__name__}"))

    def _run(self, stream: Stream) -> None:
        request = stream.request
        prompt = self._prompts.build(request.text, request.messages, len(request.images))
        decision = self._decide(stream, prompt)
        try:
            self._encode(stream, decision)
            self._decode(stream, prompt, decision)
        finally:
            with self._lock:
                self._tokens[decision.decoder] -= prompt.num_tokens + request.sampling.max_tokens
                if decision.encoder is not None:
                    self._images[decision.encoder] -= len(request.images)
            with contextlib.ExitStack() as leases:  # one that cannot be given back keeps no other
                for handle in stream.handles:
                    leases.callback(self._stages.release, handle)

    def _decide(self, stream: Stream, prompt: Prompt) -> Decision:
        request = stream.request
        with self._lock:
            decision = decide(
                len(request.images),
                {name: Load(images) for name, images in self._images.items()},
                {name: Load(tokens) for name, tokens in self._tokens.items()},
            )
            self._tokens[decision.decoder] += prompt.num_tokens + request.sampling.max_tokens
            if decision.encoder is not None:
                self._images[decision.encoder] += len(request.images)
        stream.decision = decision
        labels = {"encoder": decision.encoder or "none", "decoder": decision.decoder, "mode": decision.mode}
        self._meter.add("vlm_relay_decisions_total", labels=labels)
        return decision

    def _encode(self, stream: Stream, decision: Decision) -> None:
        """Fills `stream.handles`, in the order of the images."""
        images = stream.request.images
        encoder = decision.encoder
        if encoder is None:
            return
        if len(images) == 1:
            stream.handles.append(self._encode_one(encoder, 0, images[0]))
        else:
            tasks = [self._fan_out.submit(self._encode_one, encoder, *numbered) for numbered in enumerate(images)]
            wait(tasks)  # every lease is noted, also when another image failed
            errors = [task.exception() for task in tasks]
            stream.handles += [task.result() for task, error in zip(tasks, errors, strict=True) if error is None]
            for error in filter(None, errors):
                raise error
        stream.progress_s = self._clock()

    def _encode_one(self, encoder: str, index: int, image: bytes) -> bytes:
        try:
            return self._stages.encode(encoder, image)
        except InvalidRequest as error:
            raise InvalidImage(f"image[{index}]: {error.text}") from error

    def _decode(self, stream: Stream, prompt: Prompt, decision: Decision) -> None:
        with stream.lock:
            if stream.is_ended:
                return
            stream.decoding_on = decision.decoder
        request = stream.request
        sampling = request.sampling
        if sampling.logprobs is None and request.returns.cumulative_logprob:
            sampling = replace(sampling, logprobs=0)
        job = DecodeJob(stream.id, prompt.token_ids, tuple(stream.handles), sampling, stream.deadline_s)
        gathered = _Gathered(request.is_streaming)
        for chunk in self._stages.decode(decision.decoder, job):
            stream.progress_s = self._clock()
            if stream.is_ended:  # by the watch, whose cancel may have come before the job
                self._cancel(decision.decoder, stream.id)
                return
            gathered.add(chunk)
            if gathered.is_due() and not self._reply(stream, prompt, gathered.take()):
                return
        raise PeerGone(f"{decision.decoder} ended the stream without finishing the answer; retry")

    def _reply(self, stream: Stream, prompt: Prompt, chunk: Chunk) -> bool:
        """Sends a chunk; False when the request has ended, by this chunk or by the watch."""
        now = self._clock()
        is_last = chunk.finish_reason is not None
        with stream.lock:
            if stream.is_ended:
                return False
            is_first = stream.first_text_s is None
            decision = stream.decision if is_first and stream.request.returns.decision else None
            stream.first_text_s = now if is_first else stream.first_text_s
            stream.client.reply(Reply(stream.request, prompt, chunk, decision), is_last)  # if it raises, not ended
            stream.is_ended = is_last
            stream.decoding_on = None if is_last else stream.decoding_on
        if is_first:
            self._meter.observe("vlm_relay_ttft_seconds", now - stream.arrived_s)
        if is_last:
            self._meter.observe("vlm_relay_request_seconds", now - stream.arrived_s)
            self._settle(stream, "ok")
        return not is_last

    # -- ends ---------------------------------------------------------------------------------------------

    def _end(self, stream: Stream, error: RelayError) -> None:
        """Ends a request with an error, unless it has ended already."""
        with stream.lock:
            if stream.is_ended:
                return
            stream.is_ended = True
            decoder, stream.decoding_on = stream.decoding_on, None
            try:
                stream.client.fail(error)
            except Exception:  # nobody to tell; the place and the decoder are freed all the same
                logger.exception("%s: the client could not be told", stream.id)
        logger.log(
            logging.ERROR if isinstance(error, InternalError) else logging.INFO,
            "%s: ended after %.3f s: %s",
            stream.id,
            self._clock() - stream.arrived_s,
            error,
        )
        if decoder is not None:  # its own thread: a dead decoder answers late or never
            threading.Thread(target=self._cancel, args=(decoder, stream.id), daemon=True).start()
        self._settle(stream, error.code)

    def _cancel(self, decoder: str, request_id: str) -> None:
        try:
            self._stages.cancel(decoder, request_id)
        except RelayError as error:
            logger.warning("%s: %s could not be told to stop: %s", request_id, decoder, error)

    def _settle(self, stream: Stream, outcome: str) -> None:
        """Frees the place of an ended request."""
        with self._lock:
            self._serving.discard(stream)
        self._meter.add("vlm_relay_requests_total", labels={"outcome": outcome})
        self._dispatch()

    # -- the watch ----------------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        polled_s = self._clock()
        while not self._is_closed.wait(WATCH_S):
            now = self._clock()
            asks_clients = now - polled_s >= CANCEL_POLL_S
            polled_s = now if asks_clients else polled_s
            try:
                self._look(now, asks_clients)
            except Exception:
                logger.exception("the watch failed")

    def _look(self, now: float, asks_clients: bool) -> None:
        with self._lock:
            late = self._room.expire(now)
            waiting = self._room.items()
            serving = list(self._serving)
        for stream in late:
            self._end(stream, _too_late(stream, "waiting for a place"))
        for stream in serving:
            if stream.deadline_s is not None and now >= stream.deadline_s:
                self._end(stream, _too_late(stream, "being served"))
            elif now - stream.progress_s > self._limits.stall_s:
                self._end(stream, PeerGone(f"nothing came for {self._limits.stall_s:g} s; retry"))
        if asks_clients:
            gone = [stream for stream in waiting if _is_gone(stream)]
            with self._lock:
                self._room.remove({id(stream) for stream in gone})
            gone += [stream for stream in serving if not stream.is_ended and _is_gone(stream)]
            for stream in gone:
                self._end(stream, Cancelled("the client cancelled the request or went away"))


class _Gathered:
    """Chunks joined until there is something to send."""

    def __init__(self, is_streaming: bool) -> None:
        self._is_streaming = is_streaming
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        """Adds what came."""
        self._chunks.append(chunk)

    def is_due(self) -> bool:
        """Whether a reply should be sent now: the end, or text for a client that streams."""
        last = self._chunks[-1]
        return last.finish_reason is not None or (self._is_streaming and bool(last.text))

    def take(self) -> Chunk:
        """All that was gathered, as one chunk."""
        chunks, self._chunks = self._chunks, []
        return Chunk(
            token_ids=tuple(itertools.chain.from_iterable(chunk.token_ids for chunk in chunks)),
            text="".join(chunk.text for chunk in chunks),
            finish_reason=chunks[-1].finish_reason,
            logprobs=tuple(itertools.chain.from_iterable(chunk.logprobs for chunk in chunks)),
            cumulative_logprob=chunks[-1].cumulative_logprob,
        )


def _is_gone(stream: Stream) -> bool:
    try:
        return stream.client.is_cancelled()
    except Exception:  # one client that cannot be asked keeps no other from being asked
        logger.exception("%s: the client could not be asked", stream.id)
        return True


def _too_late(stream: Stream, doing: str) -> DeadlineExceeded:
    allowed_s = stream.request.deadline_s or 0.0
    return DeadlineExceeded(f"the deadline of {allowed_s * 1000:.0f} ms passed while {doing}")
