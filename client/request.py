"""What a client asks for, checked before it is sent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from client.errors import InvalidRequest
from client.images import Image, read_images

PRIORITIES = (-100, 100)  # model_repository/README.md
MAX_DEADLINE_S = (2**32 - 1) / 1000  # deadline_ms is UINT32

Message = Mapping[str, object]
"""`{"role": "user", "content": ...}`, where content is a string or a list of text and image parts."""


class Sampling(TypedDict, total=False):
    """The sampling parameters by name; what is not given takes the server's default."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | None


class Options(Sampling, total=False):
    """What can be given with a question, beside the sampling parameters.

    `raw`: the question is the whole prompt, word for word; else the server wraps it in the model's chat
    template. `priority`: smaller is more urgent, -100 to 100. `deadline_s`: the request ends with `DeadlineExceeded`
    this long after it was sent. `return_decision`: the answer says where it was placed. `request_id`: names
    the request in the server's log. `traceparent`: the W3C trace context that the request belongs to.
    """

    raw: bool
    priority: int
    deadline_s: float | None
    return_decision: bool
    request_id: str
    traceparent: str


@dataclass(frozen=True, slots=True)
class Request:
    """A request ready to be sent; exactly one of `text` and `messages` (JSON) is set."""

    text: str | None
    messages: str | None
    images: tuple[bytes, ...]
    sampling: str
    has_logprobs: bool
    priority: int
    deadline_s: float | None
    return_decision: bool
    request_id: str
    traceparent: str = ""
    return_progress: bool = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What travels beside the message, as gRPC metadata."""
        return (("traceparent", self.traceparent),) if self.traceparent else ()

    def with_deadline(self, deadline_s: float) -> Request:
        """The same request with what is left of its deadline."""
        return replace(self, deadline_s=deadline_s)


def request_from(
    question: str | None,
    messages: Sequence[Message] | None,
    images: Iterable[Image],
    **options: Unpack[Options],
) -> Request:
    """The request for these arguments; reads the image files.

    Raises:
        InvalidRequest: not exactly one of question and messages, or a value that the wire cannot carry.
        ImageNotReadable: an image is not there or cannot be read.
    """
    if (question is None) == (messages is None):
        raise InvalidRequest("give either a question or messages")
    if question is not None:
        _check_question(question)
    priority, deadline_s = options.get("priority", 0), options.get("deadline_s")
    _check_priority(priority)
    _check_deadline(deadline_s)
    files = read_images(images)
    if question is not None and not files and not options.get("raw", False):
        # Without an image the server takes text for a raw prompt, as vLLM does.
        messages, question = [{"role": "user", "content": question}], None
    own = Options.__annotations__.keys() - Sampling.__annotations__.keys()
    return Request(
        text=question,
        messages=None if messages is None else _json("messages", list(messages)),
        images=files,
        sampling=_sampling_json({k: v for k, v in options.items() if k not in own}),
        has_logprobs=options.get("logprobs") is not None,
        priority=priority,
        deadline_s=deadline_s,
        return_decision=bool(options.get("return_decision", False)),
        request_id=options.get("request_id", ""),
        traceparent=options.get("traceparent", ""),
    )


def _check_question(question: str) -> None:
    if not isinstance(question, str):
        raise InvalidRequest(f"the question must be a string, not {type(question).__name__}")
    try:
        question.encode()
    except UnicodeEncodeError:  # half a surrogate pair, or a command line argument that was not UTF-8
        raise InvalidRequest("the question is not valid Unicode text") from None


def _check_priority(priority: int) -> None:
    lowest, highest = PRIORITIES
    if type(priority) is not int or not lowest <= priority <= highest:
        raise InvalidRequest(f"priority must be a whole number from {lowest} to {highest}, not {priority!r}")


def _check_deadline(deadline_s: float | None) -> None:
    if deadline_s is None:
        return
    if not isinstance(deadline_s, int | float) or not 0 < deadline_s <= MAX_DEADLINE_S:  # NaN neither
        raise InvalidRequest(f"deadline_s must be above 0 and at most {MAX_DEADLINE_S:g}, not {deadline_s!r}")


def _sampling_json(values: dict[str, object]) -> str:
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} must be a finite number, not {value}")
    return _json("sampling parameters", values)


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from None
