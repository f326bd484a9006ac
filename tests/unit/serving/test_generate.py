"""A Triton request's inputs and parameters become one checked request, or one clear refusal."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from python_backend.errors import InvalidImage, InvalidPrompt, InvalidRequest, InvalidSampling
from python_backend.generate import GenerateRequest, RequestLimits, Returns, parse_generate
from python_backend.images import ImageLimits
from python_backend.request import SamplingParameters

LIMITS = RequestLimits(max_images=2, max_text_bytes=64, image=ImageLimits(max_bytes=4096, max_pixels=1024))


def png(size: tuple[int, int] = (2, 2)) -> bytes:
    """A small picture."""
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    return file.getvalue()


def texts(*values: bytes) -> npt.NDArray[np.object_]:
    """A BYTES tensor."""
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


def flag(value: bool) -> npt.NDArray[np.bool_]:
    """A BOOL tensor."""
    return np.array([value])


def parse(parameters: dict[str, object] | None = None, **inputs: npt.NDArray[np.generic]) -> GenerateRequest:
    """The request, with a text unless one is given."""
    return parse_generate({"text_input": texts(b"hello"), **inputs}, parameters or {}, LIMITS)


PLAIN = GenerateRequest("hello", None, (), SamplingParameters(), False, None, Returns(), 0, None)


def test_a_text_alone_is_a_whole_request() -> None:
    assert parse() == PLAIN


@pytest.mark.parametrize(
    ("inputs", "field", "expected"),
    [
        ({"text_input": texts("Zürich 北京".encode())}, "text", "Zürich 北京"),
        ({"messages": texts(b"[]")}, "messages", "[]"),
        ({"stream": flag(True)}, "is_streaming", True),
        ({"exclude_input_in_output": flag(True)}, "repeats_input", False),
        ({"exclude_input_in_output": flag(False)}, "repeats_input", True),
        ({"sampling_parameters": texts(b'{"max_tokens": 3}')}, "sampling", SamplingParameters(max_tokens=3)),
        ({"return_finish_reason": flag(True)}, "returns", Returns(finish_reason=True)),
        ({"return_cumulative_logprob": flag(True)}, "returns", Returns(cumulative_logprob=True)),
        ({"return_logprobs": flag(True)}, "returns", Returns(logprobs=True)),
        ({"return_num_input_tokens": flag(True)}, "returns", Returns(num_input_tokens=True)),
        ({"return_num_output_tokens": flag(True)}, "returns", Returns(num_output_tokens=True)),
        ({"return_decision": flag(True)}, "returns", Returns(decision=True)),
        ({"return_progress": flag(True)}, "returns", Returns()),  # one response only: nothing before it
        ({"return_progress": flag(True), "stream": flag(True)}, "returns", Returns(progress=True)),
        ({"priority": np.array([-100], np.int32)}, "priority", -100),
        ({"priority": np.array([100], np.int32)}, "priority", 100),
        ({"deadline_ms": np.array([1], np.uint32)}, "deadline_s", 0.001),
        ({"deadline_ms": np.array([2**32 - 1], np.uint32)}, "deadline_s", 4294967.295),
        ({"image": texts()}, "images", ()),
        ({"image": texts(png(), png((3, 3)))}, "images", (png(), png((3, 3)))),
    ],
)
def test_every_input_is_read(inputs: dict[str, npt.NDArray[np.generic]], field: str, expected: object) -> None:
    assert getattr(parse(**inputs), field) == expected


def test_shape_does_not_matter() -> None:
    assert parse(text_input=texts(b"hello").reshape(1, 1), stream=np.array([[True]])).is_streaming is True


def test_messages_need_no_text() -> None:
    request = parse_generate({"messages": texts(b"[]")}, {}, LIMITS)

    assert (request.text, request.messages) == (None, "[]")


@pytest.mark.parametrize(
    "name",
    ["priority", "timeout", "headers", "id", "traceparent", "triton_grpc_error", "sequence_id", "header_x"],
)
def test_parameters_of_triton_and_its_clients_are_ignored(name: str) -> None:
    assert parse({name: "anything"}) == PLAIN


def test_sampling_parameters_may_stand_at_the_top() -> None:
    assert parse({"max_tokens": 20, "stop": "x"}).sampling == SamplingParameters(max_tokens=20, stop=("x",))


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(InvalidSampling, match="unknown sampling parameter 'max_token'; allowed: "):
        parse({"max_token": 20})


def test_sampling_given_in_both_places_is_refused() -> None:
    with pytest.raises(InvalidSampling) as refused:
        parse({"top_p": 1, "max_tokens": 20}, sampling_parameters=texts(b"{}"))
    assert refused.value.text == (
        "sampling parameters are given twice: in sampling_parameters and as max_tokens, top_p"
    )


@pytest.mark.parametrize(
    ("inputs", "error", "told"),
    [
        (
            {"stream": flag(True), "exclude_input_in_output": flag(False)},
            InvalidRequest,
            "exclude_input_in_output false is not allowed when streaming",
        ),
        ({"text_input": texts(b"ab\xff")}, InvalidPrompt, "text_input is not UTF-8: invalid start byte at byte 2"),
        ({"messages": texts(b"\xc3")}, InvalidPrompt, "messages is not UTF-8: unexpected end of data at byte 0"),
        ({"text_input": texts(b"x" * 65)}, InvalidPrompt, "text_input has 65 bytes; at most 64 are allowed"),
        ({"image": texts(*[png()] * 3)}, InvalidImage, "the request has 3 images; at most 2 are allowed"),
        ({"priority": np.array([101])}, InvalidRequest, "priority must be between -100 and 100, not 101"),
        ({"priority": np.array([-101])}, InvalidRequest, "priority must be between -100 and 100, not -101"),
        ({"deadline_ms": np.array([0], np.uint32)}, InvalidRequest, "deadline_ms must be at least 1"),
        (
            {"image": texts(png(), png((40, 40)))},
            InvalidImage,
            "image[1]: the image has 40 x 40 pixels; at most 1024 in all are allowed",
        ),
        (
            {"sampling_parameters": texts(b"[]")},
            InvalidSampling,
            "sampling_parameters must be a JSON object, not a list",
        ),
        (
            {"sampling_parameters": texts(b"\xff")},
            InvalidPrompt,
            "sampling_parameters is not UTF-8: invalid start byte at byte 0",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    inputs: dict[str, npt.NDArray[np.generic]], error: type[InvalidRequest], told: str
) -> None:
    with pytest.raises(error) as refused:
        parse(**inputs)
    assert refused.value.text == told
