from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from client.errors import InvalidRequest
from client.gateway.settings import Settings
from client.relay_async import AsyncRelayClient
from tests.unit.gateway.conftest import Gateway, Start, Upstream, image_part, running_upstream

TEXT = [{"role": "user", "content": "What?"}]


@pytest.fixture(scope="module")
def refusing() -> Iterator[Gateway]:
    """One gateway for all requests that are refused; nothing may have reached the server."""
    with running_upstream() as upstream:
        gateway = Gateway(Settings(url=upstream.address))
        yield gateway
        gateway.close()
        assert upstream.requests == []


def _url(url: str) -> list[dict[str, object]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "messages: Field required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages", "'text', 'image_url'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "messages.0.content"),
        ({"messages": [{"role": "user", "content": _url("http://127.0.0.1/a.png")}]}, "messages", "not fetched"),
        ({"messages": [{"role": "user", "content": _url("HTTPS://a/b")}]}, "messages", "not fetched"),
        ({"messages": [{"role": "user", "content": _url("file:///etc/passwd")}]}, "messages", "must be a data: URI"),
        ({"messages": [{"role": "user", "content": _url("data:image/png;base64,?")}]}, "messages", "not base64"),
        ({"messages": [{"role": "user", "content": _url("data:image/png;base64,")}]}, "messages", "is empty"),
        ({"messages": [{"role": "user", "content": [image_part(b"A")] * 9}]}, "messages", "at most 8"),
        ({"messages": TEXT, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": TEXT, "temperature": -1}, "temperature", "temperature: "),
        ({"messages": TEXT, "temperature": float("nan")}, "temperature", "temperature: "),
        ({"messages": TEXT, "seed": 2**70}, "seed", "seed: "),
        ({"messages": TEXT, "stop": [""]}, "stop", "at least 1 character"),
        ({"messages": TEXT, "n": 2}, "n", "n must be 1"),
        ({"messages": TEXT, "best_of": 2}, "best_of", "best_of must be 1"),
        ({"messages": TEXT, "tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"messages": TEXT, "functions": [{}]}, "tools", "not supported"),
        ({"messages": TEXT, "modalities": ["audio"]}, "modalities", "text only"),
        ({"messages": TEXT, "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"messages": TEXT, "response_format": {"type": "json_object"}}, "response_format", "only text"),
        ({"messages": TEXT, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"messages": TEXT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"messages": TEXT, "min_tokens": 9, "max_tokens": 3}, "min_tokens", "above max_tokens"),
    ],
)
def test_what_cannot_be_served_is_named_and_never_sent(
    refusing: Gateway, body: dict[str, object], param: str, words: str
) -> None:
    response = refusing.http.post(
        "/v1/chat/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )

    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt: Field required"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"prompt": " "}, "empty"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_text_completions_refuse_what_they_do_not_have(refusing: Gateway, body: dict[str, object], words: str) -> None:
    response = refusing.http.post("/v1/completions", json=body)

    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"{", "application/json", "not JSON"),
        (b"[1]", "application/json", "must be"),
        (b"[" * 100_000, "application/json", ""),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", ""),
        (b"\xff\xfe", "application/json", ""),
        (b'{"messages": []}', "application/x-www-form-urlencoded", "Content-Type: application/json"),
        (b"", "application/json", ""),
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(refusing: Gateway, content: bytes, kind: str, words: str) -> None:
    response = refusing.http.post("/v1/chat/completions", content=content, headers={"Content-Type": kind})

    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_another_model_is_a_404_with_openais_code(refusing: Gateway) -> None:
    asked = refusing.chat(model="gpt-4o")
    looked_up = refusing.http.get("/v1/models/gpt-4o")

    for response in (asked, looked_up):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/no/such", "/v1/embeddings", "/page/../../settings.py", "/..%2fapp.py"])
def test_unknown_paths_are_404_in_openais_form(refusing: Gateway, path: str) -> None:
    response = refusing.http.get(path)

    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_wrong_method_is_a_405_in_openais_form(refusing: Gateway) -> None:
    response = refusing.http.get("/v1/chat/completions")

    assert response.status_code == 405
    assert response.json()["error"]["message"] == "Method Not Allowed"


def test_an_image_over_the_limit_is_a_413(start: Start) -> None:
    response = start(max_image_mib=1).chat([image_part(b"x" * (2**20 + 10))])

    assert response.status_code == 413
    assert "at most 1" in response.json()["error"]["message"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_a_413_and_not_kept(start: Start, is_chunked: bool) -> None:
    gateway = start(max_body_mib=1)
    content = b"x" * 2**20

    parts = iter([content, content]) if is_chunked else content * 2
    response = gateway.http.post("/v1/chat/completions", content=parts)

    assert response.status_code == 413
    assert "at most 1 MiB" in response.json()["error"]["message"]


def test_a_body_that_does_not_come_is_a_408(start: Start) -> None:
    gateway = start(body_timeout_s=0.2)
    host, port = gateway.url.removeprefix("http://").split(":")

    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        answer = connection.recv(4096)

    assert answer.startswith(b"HTTP/1.1 408")


def test_more_requests_than_allowed_are_a_429(start: Start, upstream: Upstream) -> None:
    upstream.play([upstream.chunk("a "), upstream.silence()])
    gateway = start(max_in_flight=1)

    with gateway.http.stream("POST", "/v1/chat/completions", json={"messages": TEXT, "stream": True}) as running:
        lines = running.iter_lines()  # kept: httpx closes the connection with it
        next(lines)
        response = gateway.chat()

    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert upstream.cancelled.wait(30)


def test_what_the_client_library_refuses_leaves_nothing_in_flight(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise InvalidRequest("the question cannot be sent")

    monkeypatch.setattr(AsyncRelayClient, "stream", refuse)
    gateway = start()

    response = gateway.chat()

    assert (response.status_code, gateway.is_idle()) == (400, True)
    assert response.json()["error"]["message"] == "the question cannot be sent"
