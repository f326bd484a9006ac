"""What a client gets back: the answer, its chunks while it streams, and the log-probabilities on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have stood at one place of the answer; `rank` 1 was the likeliest."""

    token_id: int
    text: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The text since the last chunk; `finish_reason` is set in the last one only.

    `logprobs` has one entry per token, each with its alternatives, when `logprobs` was asked for.
    """

    text: str
    finish_reason: str | None
    num_output_tokens: int
    logprobs: tuple[tuple[Alternative, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is before its first text: `placed`, with the server's decision if asked for, then `encoded`."""

    stage: str
    decision: Mapping[str, object] | None


Told = Callable[[Progress], object]
"""Called with each progress, by who iterates the stream."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The text so far and what it took.

    `finish_reason` is `stop` or `length`, and None as long as the answer is not complete. `ttft_s` runs from
    sending the request to its first chunk (None before that), `total_s` to its last. `decision` is the
    server's word on where it placed the request, a JSON object, when `return_decision` was set.
    """

    text: str
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    decision: Mapping[str, object] | None
    ttft_s: float | None
    total_s: float
    logprobs: tuple[tuple[Alternative, ...], ...] = ()

    @property
    def output_tokens_per_s(self) -> float | None:
        """The rate after the first chunk's arrival; None where a rate makes no sense, as with one chunk."""
        if self.ttft_s is None or self.num_output_tokens < 2 or self.total_s <= self.ttft_s:
            return None
        return (self.num_output_tokens - 1) / (self.total_s - self.ttft_s)


NO_ANSWER = Answer("", None, 0, 0, None, None, 0.0)
"""Of a request that was never sent."""
