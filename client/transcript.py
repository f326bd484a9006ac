"""The answer as it grows, reply by reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from client.answer import Alternative, Answer, Chunk, Told
from client.wire import Reply


class Transcript:
    """All that one stream has brought so far; owned by that stream."""

    def __init__(self, clock: Callable[[], float], on_progress: Told | None = None) -> None:
        self._clock = clock
        self._on_progress = on_progress
        self._started_at = clock()
        self._first_at: float | None = None
        self._last_at = self._started_at
        self._texts: list[str] = []
        self._logprobs: list[tuple[Alternative, ...]] = []
        self._finish_reason: str | None = None
        self._num_input_tokens = 0
        self._num_output_tokens = 0
        self._decision: Mapping[str, object] | None = None
        self.is_final = False

    @property
    def has_begun(self) -> bool:
        """Whether a chunk has arrived; from then on the request cannot be sent again."""
        return self._first_at is not None

    @property
    def is_ending(self) -> bool:
        """Whether the last chunk has arrived; only the final mark is still to come."""
        return self._finish_reason is not None

    def start(self) -> None:
        """Count the times from now, when the request is sent."""
        self._started_at = self._last_at = self._clock()

    def add(self, reply: Reply) -> Chunk | None:
        """The chunk in `reply`, if it has one; a progress is told to who wants to know."""
        self._last_at = self._clock()
        self.is_final = reply.is_final
        self._decision = reply.decision or self._decision
        self._num_input_tokens = reply.num_input_tokens or self._num_input_tokens
        if reply.progress is not None and self._on_progress is not None:
            self._on_progress(reply.progress)
        chunk = reply.chunk
        if chunk is not None:
            self._first_at = self._last_at if self._first_at is None else self._first_at
            self._texts.append(chunk.text)
            self._logprobs.extend(chunk.logprobs)
            self._finish_reason = chunk.finish_reason or self._finish_reason
            self._num_output_tokens += chunk.num_output_tokens
        return chunk

    @property
    def answer(self) -> Answer:
        """What has arrived so far."""
        return Answer(
            text="".join(self._texts),
            finish_reason=self._finish_reason,
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=self._num_output_tokens,
            decision=self._decision,
            ttft_s=None if self._first_at is None else self._first_at - self._started_at,
            total_s=self._last_at - self._started_at,
            logprobs=tuple(self._logprobs),
        )
