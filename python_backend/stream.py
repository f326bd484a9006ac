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
from python_backend.timeline import Timeline
from scheduler.decision import Decision
from scheduler.ledger import Place
from scheduler.observed import MIN_STEPS, Observed

ERROR = "error"
"""The finish reason of a decoder's last response when its report has an error."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the decoder gave since the last one."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[Mapping[str, object], ...] = ()
    cumulative_logprob: float = 0.0
    transfer_s: float = 0.0  # on a last chunk: how long the embeddings were copied
    transfer_bytes: int = 0  # the same: how much
    times: Mapping[str, float] = field(default_factory=dict)  # on a last chunk: when the decoder did what


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """What the decoder is asked for."""

    request_id: str
    token_ids: tuple[int, ...]
    handles: tuple[bytes, ...]
    sampling: SamplingParameters
    deadline_s: float | None  # on the machine's monotonic clock
    generated_ids: tuple[int, ...] = ()  # tokens that another decoder gave already
    rank: float = 0.0  # smaller starts first


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image's features in a store: a handle with a lease, and whether they were there already."""

    handle: bytes
    is_cached: bool = False


class Stages(Protocol):
    """The two stages, by replica name. Raises `RelayError` where a stage refuses or is gone."""

    def encode(self, encoder: str, image: bytes) -> Encoded:
        """The features of an image file."""

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
    observed: Observed | None = None  # with it


@dataclass(frozen=True, slots=True)
class Progress:
    """What a client that asks for it is told before the first text."""

    stage: Literal["placed", "encoded"]
    decision: Decision | None  # with `placed`, where asked for


class Client(Protocol):
    """The other end of a request."""

    def reply(self, reply: Reply, is_last: bool) -> None:
        """Sends one response, with the final flag if it is the last."""

    def progress(self, progress: Progress) -> None:
        """Sends how far the request is."""

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
            transfer_s=chunks[-1].transfer_s,
        )


@dataclass(slots=True, eq=False)
class Attempt:
    """One try to serve a request: what it holds, and the replicas it waits for."""

    number: int
    place: Place | None = None  # what its decision is charged with at the replicas
    is_arriving: bool = False  # has a place, and is not charged for yet
    waits_on: frozenset[str] = frozenset()
    is_decoding: bool = False
    handles: list[bytes] = field(default_factory=list)
    observed: Observed = field(default_factory=Observed)
    first_s: float | None = None  # when its first chunk came
    num_tokens: int = 0  # of the chunks after it

    def keep(self, encoded: Encoded) -> None:
        """Takes a lease over, also one that comes after the attempt was closed: whoever closes it again frees it."""
        self.handles.append(encoded.handle)
        self.observed.has_cached |= encoded.is_cached

    def note_chunk(self, chunk: Chunk, began_s: float, now_s: float) -> None:
        """Keeps the times of a decoder's answer that was asked for at `began_s`."""
        observed = self.observed
        if self.first_s is None:
            self.first_s = now_s
            observed.prefill_s = now_s - began_s
        else:
            self.num_tokens += len(chunk.token_ids)
            observed.step_s = (now_s - self.first_s) / max(1, self.num_tokens)
        if chunk.finish_reason is not None:
            observed.transfer_s = chunk.transfer_s
            observed.prefill_s = max(0.0, observed.prefill_s - chunk.transfer_s)
            if self.num_tokens < MIN_STEPS:
                observed.step_s = 0.0


@dataclass(slots=True, eq=False)
class Stream:
    """One accepted request. `lock` guards all that changes, and every word to the client."""

    id: str
    request: GenerateRequest
    client: Client
    arrived_s: float
    rank: float  # smaller is more urgent
    deadline_s: float | None
    progress_s: float
    attempt: Attempt
    gathered: Gathered
    timeline: Timeline
    trace: str = ""  # the context of its trace; empty: it has none
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_ended: bool = False
    token_ids: list[int] = field(default_factory=list)  # of the answer so far, whoever gave them
    cumulative_logprob: float = 0.0
    first_reply_s: float | None = None

    def job_id(self, attempt: Attempt) -> str:
        """The name of an attempt at the decoder."""
        return f"{self.id}.{attempt.number}"
