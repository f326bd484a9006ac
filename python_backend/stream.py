"""One request on its way: what it is, what it has got, what it holds; and those it deals with."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from python_backend.errors import RelayError
from python_backend.generate import GenerateRequest
from python_backend.prompt import Prompt
from python_backend.request import SamplingParameters
from scheduler.decision import Decision
from scheduler.ledger import Place


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
    generated_ids: tuple[int, ...] = ()  # tokens that another decoder gave already


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


@dataclass(frozen=True, slots=True)
class Progress:
    """What a client that asks for it is told before the first text."""

    stage: Literal["placed", "encoded"]
    decision: Decision | None  # with `placed`, where asked for


class Client(Protocol):
    """The other end of a request."""

    def progress(self, progress: Progress) -> None:
        """Sends a response that says how far the request is."""

    def reply(self, reply: Reply, is_last: bool) -> None:
        """Sends one response, with the final flag if it is the last."""

    def fail(self, error: RelayError) -> None:
        """Sends an error with the final flag."""

    def is_cancelled(self) -> bool:
        """Whether nobody listens any more."""


class Gathered:
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


@dataclass(slots=True, eq=False)
class Attempt:
    """One try to serve a request: what it holds, and the replicas it waits for."""

    number: int
    decision: Decision | None = None
    place: Place | None = None  # what the decision is charged with at the replicas
    waits_on: frozenset[str] = frozenset()
    is_decoding: bool = False
    handles: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Stream:
    """One accepted request. `lock` guards all that changes, and every word to the client."""

    id: str
    request: GenerateRequest
    client: Client
    arrived_s: float
    deadline_s: float | None
    progress_s: float
    attempt: Attempt
    gathered: Gathered
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_ended: bool = False
    token_ids: list[int] = field(default_factory=list)  # of the answer so far, whoever gave them
    cumulative_logprob: float = 0.0
    first_reply_s: float | None = None

    def job_id(self, attempt: Attempt) -> str:
        """The name of an attempt at the decoder."""
        return f"{self.id}.{attempt.number}"
