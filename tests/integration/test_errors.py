"""What is wrong with a request is said in one line with a stable code, and disturbs nobody else."""

from __future__ import annotations

import base64
import io
import json
import queue
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as triton
from PIL import Image

from client import DeadlineExceeded, RelayClient
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION, assert_idle, num_threads, unchanged_neighbour, wait_until


def _large_picture() -> bytes:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    return file.getvalue()


def _png(size: int = 40) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size)).save(file, "PNG")
    return file.getvalue()


PDF = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n"

# name: (text_input, images, sampling_parameters, what the message says)
CASES: dict[str, tuple[str | None, list[bytes], str | None, str]] = {
    "no text": (None, [], None, "text_input is missing or empty"),
    "empty text": ("  ", [_png()], None, "text_input is missing or empty"),
    "no image behind a mark": (
        "USER: <image>\nHi ASSISTANT:",
        [],
        None,
        "1 <image> mark(s) and the request has 0 image(s)",
    ),
    "more marks than images": (
        "<image> <image> Hi",
        [_png()],
        None,
        "2 <image> mark(s) and the request has 1 image(s)",
    ),
    "an empty image": ("Hi", [b""], None, "image[0]: the image is empty"),
    "a broken image": ("Hi", [_png(), PICTURE.read_bytes()[:2000]], None, "image[1]: the JPEG image cannot be decoded"),
    "a PDF": ("Hi", [PDF], None, "image[0]: not an image (it starts with b'%PDF-1.7'); allowed: JPEG, PNG"),
    "a PDF in base64": ("Hi", [base64.b64encode(PDF)], None, "allowed: JPEG, PNG"),
    "a URL": ("Hi", [b"http://127.0.0.1/picture.jpg"], None, "image URLs are not fetched"),
    "too many pixels": ("Hi", [_large_picture()], None, "9000 x 9000 pixels; at most"),
    "too many bytes": ("Hi", [_png() + bytes(21 << 20)], None, "bytes; at most 20971520 are allowed"),
    "too many images": ("Hi", [_png()] * 9, None, "the request has 9 images; at most 8"),
    "a prompt beyond the context": ("circle " * 3000, [], None, "the context holds 2048"),
    "too much text": ("x" * (257 << 10), [], None, "at most 262144 are allowed"),
    "an unknown parameter": (
        "Hi",
        [],
        '{"temprature": 1}',
        "unknown sampling parameter 'temprature'; allowed: frequency",
    ),
    "a wrong type": ("Hi", [], '{"max_tokens": [1]}', "max_tokens must be a whole number, not a list"),
    "max_tokens 0": ("Hi", [], '{"max_tokens": 0}', "max_tokens must be between 1 and"),
    "not JSON": ("Hi", [], "max_tokens=3", "sampling_parameters is not JSON"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_request_gets_its_code_and_one_clear_line(server: Server, case: str) -> None:
    text, images, sampling, words = CASES[case]
    message = _error(server, text, images, sampling)
    assert "[INVALID_ARGUMENT] " in message
    assert words in message
    assert "\n" not in message
    assert "Traceback" not in message
    assert_idle(server)


def test_bad_requests_do_not_disturb_a_neighbour(server: Server, client: RelayClient) -> None:
    with unchanged_neighbour(client, PICTURE, QUESTION):
        for text, images, sampling, words in CASES.values():
            assert words in _error(server, text, images, sampling)


def test_grpc_carries_the_right_status_when_asked(server: Server) -> None:
    error = _grpc_error(server, "Hi", [PDF], None, headers={"triton_grpc_error": "true"})
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert error.message().startswith("[INVALID_ARGUMENT] image[0]: not an image")


def test_http_generate_answers_an_error_with_400_and_the_code(server: Server) -> None:
    status, body = _post(server, "generate", {"text_input": "Hi", "max_tokens": 0})
    assert status == 400
    assert body["error"].startswith("[INVALID_ARGUMENT] max_tokens must be between 1 and")


def test_an_unknown_key_in_plain_json_is_an_error_too(server: Server) -> None:
    status, body = _post(server, "generate", {"text_input": "Hi", "temprature": 0.5})
    assert status == 400
    assert "unknown sampling parameter 'temprature'" in body["error"]


def _error(server: Server, text: str | None, images: list[bytes], sampling: str | None) -> str:
    return str(_grpc_error(server, text, images, sampling).message())


def _grpc_error(
    server: Server,
    text: str | None,
    images: list[bytes],
    sampling: str | None,
    headers: dict[str, str] | None = None,
) -> Exception:
    """The error that tritonclient reports for a streaming request; fails when there is none."""
    inputs = []
    for name, values in (
        ("text_input", [] if text is None else [text.encode()]),
        ("image", images),
        ("sampling_parameters", [] if sampling is None else [sampling.encode()]),
    ):
        if values:
            inputs.append(triton.InferInput(name, [len(values)], "BYTES"))
            inputs[-1].set_data_from_numpy(np.array(values, dtype=np.object_))
    if not inputs:  # Triton refuses a request without any input before it reaches the model
        inputs.append(triton.InferInput("stream", [1], "BOOL"))
        inputs[-1].set_data_from_numpy(np.array([True]))
    answers: queue.Queue[Exception | None] = queue.Queue()
    with triton.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as stock:
        stock.start_stream(lambda result, error: answers.put(error), headers=headers)
        stock.async_stream_infer("llava", inputs)
        error = answers.get(timeout=30)
        stock.stop_stream()
    assert error is not None, "the request was answered"
    return error


def _post(server: Server, verb: str, body: dict[str, object]) -> tuple[int, dict[str, str]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.ports.http}/v2/models/llava/{verb}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_requests_that_end_early_leave_no_thread_behind(server: Server, client: RelayClient) -> None:
    client.ask("Who are you?", max_tokens=1)
    before = num_threads(server, "llava")
    for _ in range(12):
        with client.stream("Count from one to twenty.", max_tokens=300, ignore_eos=True) as stream:
            next(iter(stream))
        with pytest.raises(DeadlineExceeded):
            client.ask("Count from one to twenty.", max_tokens=1500, ignore_eos=True, deadline_s=0.1)
    assert_idle(server)

    assert wait_until(lambda: num_threads(server, "llava") <= before + 2), (before, num_threads(server, "llava"))
