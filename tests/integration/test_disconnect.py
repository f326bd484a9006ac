"""A client that goes away frees its slot: in the middle of its text or before, over gRPC and over HTTP."""

from __future__ import annotations

import base64
import http.client
import json

import pytest

from client import Progress, RelayClient
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION, assert_idle, generated_at_the_end

pytestmark = pytest.mark.server

NUM_TOKENS = 1800  # nobody who is gone gets that many


class Left(Exception):
    """Raised to leave a stream where it is."""


def _assert_stopped(server: Server, before: float) -> None:
    """The decoder's slot is free, and its counter stands far below a whole answer."""
    assert_idle(server)
    assert generated_at_the_end(server) - before < NUM_TOKENS / 2


def test_grpc_in_the_middle_of_the_text(server: Server, client: RelayClient) -> None:
    before = generated_at_the_end(server)

    with client.stream(QUESTION, images=[PICTURE], max_tokens=NUM_TOKENS, ignore_eos=True) as stream:
        next(stream)

    _assert_stopped(server, before)


@pytest.mark.parametrize("stage", ["placed", "encoded"])
def test_grpc_before_the_text(server: Server, client: RelayClient, stage: str) -> None:
    before = generated_at_the_end(server)

    def leave(progress: Progress) -> None:
        if progress.stage == stage:
            raise Left

    with (
        pytest.raises(Left),
        client.stream(QUESTION, images=[PICTURE], max_tokens=NUM_TOKENS, ignore_eos=True, on_progress=leave) as stream,
    ):
        list(stream)

    assert stream.answer.text == ""
    _assert_stopped(server, before)


@pytest.mark.parametrize("last_seen", ["placed", "encoded", "text"])
def test_http_before_and_in_the_middle_of_the_text(server: Server, last_seen: str) -> None:
    before = generated_at_the_end(server)
    body = {
        "text_input": QUESTION,
        "image": base64.b64encode(PICTURE.read_bytes()).decode(),
        "stream": True,
        "return_progress": True,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }

    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=30)
    connection.request(
        "POST", "/v2/models/llava/generate_stream", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    seen = ""
    while seen != last_seen:
        line = response.readline()
        assert line, "the answer ended"
        if line.startswith(b"data: "):
            seen = json.loads(line[6:]).get("progress") or "text"
    connection.sock.close()
    response.close()
    connection.close()

    _assert_stopped(server, before)
