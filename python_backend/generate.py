"""The request a client sends to `llava`, parsed and checked once at the edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from python_backend.errors import InvalidImage, InvalidPrompt, InvalidRequest, InvalidSampling
from python_backend.images import ImageLimits, unwrap
from python_backend.request import SamplingParameters, parse_sampling, sampling_from

Inputs = Mapping[str, npt.NDArray[Any]]

PRIORITIES = (-100, 100)
# Request parameters that Triton or its clients set; never a sampling parameter.
_RESERVED = {"priority", "timeout", "headers", "binary_data_output", "traceparent", "tracestate", "id"}
_RESERVED_PREFIXES = ("triton_", "sequence_", "header_")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for at most."""

    max_images: int
    max_text_bytes: int
    image: ImageLimits


@dataclass(frozen=True, slots=True)
class Returns:
    """Which of the additional outputs the client wants."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    decision: bool = False
    progress: bool = False  # one response more at each step before the text


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation: text or messages, images as file bytes, and how to answer."""

    text: str | None
    messages: str | None
    images: tuple[bytes, ...]
    sampling: SamplingParameters
    is_streaming: bool
    repeats_input: bool | None  # None: not said
    returns: Returns
    priority: int
    deadline_s: float | None  # after arrival


def parse_generate(inputs: Inputs, parameters: Mapping[str, Any], limits: RequestLimits) -> GenerateRequest:
    """The request in a Triton request's inputs (name to array) and parameters.

    Raises:
        InvalidRequest: whatever is wrong with it, in one line.
    """
    excludes = _flag(inputs, "exclude_input_in_output")
    is_streaming = _flag(inputs, "stream") or False
    if is_streaming and excludes is False:
        raise InvalidRequest("exclude_input_in_output false is not allowed when streaming")
    return GenerateRequest(
        text=_text(inputs, "text_input", limits.max_text_bytes),
        messages=_text(inputs, "messages", limits.max_text_bytes),
        images=_images(inputs, limits),
        sampling=_sampling(inputs, parameters),
        is_streaming=is_streaming,
        repeats_input=None if excludes is None else not excludes,
        returns=Returns(
            finish_reason=_flag(inputs, "return_finish_reason") or False,
            cumulative_logprob=_flag(inputs, "return_cumulative_logprob") or False,
            logprobs=_flag(inputs, "return_logprobs") or False,
            num_input_tokens=_flag(inputs, "return_num_input_tokens") or False,
            num_output_tokens=_flag(inputs, "return_num_output_tokens") or False,
            decision=_flag(inputs, "return_decision") or False,
            progress=is_streaming and (_flag(inputs, "return_progress") or False),
        ),
        priority=_priority(inputs),
        deadline_s=_deadline_s(inputs),
    )


def _text(inputs: Inputs, name: str, max_bytes: int) -> str | None:
    if name not in inputs:
        return None
    data = bytes(inputs[name].reshape(-1)[0])
    if len(data) > max_bytes:
        raise InvalidPrompt(f"{name} has {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error


def _images(inputs: Inputs, limits: RequestLimits) -> tuple[bytes, ...]:
    given = [] if "image" not in inputs else [bytes(item) for item in inputs["image"].reshape(-1)]
    if len(given) > limits.max_images:
        raise InvalidImage(f"the request has {len(given)} images; at most {limits.max_images} are allowed")
    images = []
    for index, data in enumerate(given):
        try:
            images.append(unwrap(data, limits.image))
        except InvalidImage as error:
            raise InvalidImage(f"image[{index}]: {error.text}") from error
    return tuple(images)


def _sampling(inputs: Inputs, parameters: Mapping[str, Any]) -> SamplingParameters:
    loose = {
        name: value
        for name, value in parameters.items()
        if name not in _RESERVED and not name.startswith(_RESERVED_PREFIXES)
    }
    if "sampling_parameters" not in inputs:
        return sampling_from(loose)
    if loose:
        raise InvalidSampling(
            f"sampling parameters are given twice: in sampling_parameters and as {', '.join(sorted(loose))}"
        )
    return parse_sampling(_text(inputs, "sampling_parameters", 1 << 16) or "")


def _flag(inputs: Inputs, name: str) -> bool | None:
    return bool(inputs[name].reshape(-1)[0]) if name in inputs else None


def _priority(inputs: Inputs) -> int:
    if "priority" not in inputs:
        return 0
    priority = int(inputs["priority"].reshape(-1)[0])
    if not PRIORITIES[0] <= priority <= PRIORITIES[1]:
        raise InvalidRequest(f"priority must be between {PRIORITIES[0]} and {PRIORITIES[1]}, not {priority}")
    return priority


def _deadline_s(inputs: Inputs) -> float | None:
    if "deadline_ms" not in inputs:
        return None
    deadline_ms = int(np.asarray(inputs["deadline_ms"]).reshape(-1)[0])
    if deadline_ms <= 0:
        raise InvalidRequest("deadline_ms must be at least 1")
    return deadline_ms / 1000
