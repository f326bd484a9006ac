"""A client that calls a stage itself gets nothing by a handle that this server did not issue to it."""

from __future__ import annotations

import json
import queue
import secrets

import numpy as np
import pytest
import tritonclient.grpc as triton

from launcher.server import Server
from tests.integration.observe import PICTURE, assert_idle

IMAGE_TOKEN = "<image>"


@pytest.fixture
def handle(server: Server) -> bytes:
    """A true handle, with a lease, as the encoder gives it."""
    tensor = triton.InferInput("image", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[PICTURE.read_bytes()]], dtype=np.object_))
    with triton.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as stock:
        return bytes(stock.infer("clip_encoder", [tensor]).as_numpy("handle")[0, 0])


def test_a_handle_is_small_and_good_once(server: Server, handle: bytes) -> None:
    assert len(handle) < 256
    assert _decode(server, handle) is None
    assert_idle(server)


@pytest.mark.parametrize("place", [0, 8, 30, 60, 90, 143, 175])
def test_a_forged_handle_is_refused(server: Server, handle: bytes, place: int) -> None:
    forged = bytearray(handle)
    forged[place] ^= 1
    assert _decode(server, bytes(forged)).startswith("[INVALID_ARGUMENT] ")
    assert _decode(server, handle) is None


@pytest.mark.parametrize("size", [0, 1, 175, 177, 5000])
def test_bytes_that_are_no_handle_are_refused(server: Server, size: int) -> None:
    assert "an embedding handle has 176 bytes" in _decode(server, secrets.token_bytes(size))


def test_a_foreign_handle_is_refused(server: Server, handle: bytes) -> None:
    from python_backend.transport.boot import BootKey
    from python_backend.transport.handle import EmbeddingHandle, fingerprint_of

    foreign = EmbeddingHandle(
        segment="vlm_relay.1-1-1.0123456789abcdef",
        slot=0,
        offset=8192,
        shape=(576, 192),
        dtype="float32",
        generation=2,
        lease_index=0,
        lease_id=1,
        digest=bytes(16),
        fingerprint=fingerprint_of("another model"),
    ).seal(BootKey("1-1-1", secrets.token_bytes(32)))
    assert len(foreign) == len(handle)
    assert "wrong seal" in _decode(server, foreign)


def test_as_many_handles_as_image_tokens(server: Server, handle: bytes) -> None:
    assert "[INVALID_ARGUMENT]" in _decode(server, handle, handle)
    assert "[INVALID_ARGUMENT]" in _decode(server)


def _decode(server: Server, *handles: bytes) -> str | None:
    """The error of a direct call to the decoder with a prompt of one image; None when it answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("demo/checkpoint")
    token_ids = np.array(tokenizer.encode(f"USER: {IMAGE_TOKEN}\nHi ASSISTANT:"), dtype=np.int32)
    inputs = [
        _bytes("request_id", secrets.token_hex(8).encode()),
        _bytes("sampling_parameters", b'{"max_tokens": 1}'),
        triton.InferInput("token_ids", [len(token_ids)], "INT32"),
    ]
    inputs[-1].set_data_from_numpy(token_ids)
    if handles:
        inputs.append(_bytes("handles", *handles))
    answers: queue.Queue[triton.InferResult] = queue.Queue()
    with triton.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as stock:
        stock.start_stream(lambda result, error: answers.put(result))
        stock.async_stream_infer("llava_decoder", inputs)
        answer = answers.get(timeout=30)
        stock.stop_stream()
    if answer.as_numpy("finish_reason")[0] != b"error":
        return None
    return str(json.loads(answer.as_numpy("report")[0])["error"])


def _bytes(name: str, *values: bytes) -> triton.InferInput:
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=np.object_))
    return tensor
