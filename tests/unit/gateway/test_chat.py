from __future__ import annotations

import json
import statistics
import time

import httpx
import pytest

from tests.unit.gateway.conftest import Gateway, Start, Upstream, events_of, image_part

FULL = "[UNAVAILABLE] the queue is full; retry after 1.5 s"


def test_a_whole_answer_has_text_reason_and_usage(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("a ", "red ", "car")

    answer = gateway.chat().json()

    assert (answer["object"], answer["model"]) == ("chat.completion", "llava")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "a red car", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_a_stream_is_role_words_reason_done(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("a ", "", "car", finish_reason="length")

    response = gateway.chat(stream=True)

    chunks = events_of(response)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [  # type: ignore[index]
        {"role": "assistant", "content": ""},
        {"content": "a "},
        {"content": "car"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]  # type: ignore[index]
    assert len({(chunk["id"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert "usage" not in chunks[0]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


def test_include_usage_adds_one_chunk_without_choices(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("a ", "car")

    *chunks, last = events_of(gateway.chat(stream=True, stream_options={"include_usage": True}))

    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_images_travel_as_files_in_order_and_across_turns(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("yes")
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [image_part(b"A"), {"type": "text", "text": "What?"}, image_part(b"B", "png")]},
        {"role": "assistant", "content": "A car."},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, image_part(b"C")]},
    ]

    response = gateway.http.post("/v1/chat/completions", json={"model": "llava", "messages": messages})

    assert response.status_code == 200
    image, words = {"type": "image"}, "text"
    assert upstream.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, {"type": words, "text": "What?"}, image]},
        {"role": "assistant", "content": "A car."},
        {"role": "user", "content": [{"type": words, "text": "And this?"}, image]},
    ]
    assert upstream.tensors()["image"] == b"\1\0\0\0A\1\0\0\0B\1\0\0\0C"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_tokens": 5}),
        ({"stop": "."}, {"stop": "."}),
        ({"stop": [".", "!"], "seed": 7}, {"stop": [".", "!"], "seed": 7}),
        ({"stop": [], "seed": None}, {}),
        ({"temperature": 0.5, "top_p": 0}, {"temperature": 0.5, "top_p": 1e-9}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1, "frequency_penalty": -1}),
        (
            {"ignore_eos": True, "min_tokens": 2, "max_tokens": 2},
            {"ignore_eos": True, "min_tokens": 2, "max_tokens": 2},
        ),
        ({"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}, {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"n": 1, "tools": [], "user": "me", "no_such_field": {"a": [1]}}, {}),
        ({"response_format": {"type": "text"}, "tool_choice": "none", "logit_bias": {}}, {}),
    ],
)
def test_sampling_fields_become_the_servers(
    upstream: Upstream, gateway: Gateway, given: dict[str, object], asked: dict[str, object]
) -> None:
    upstream.answers("yes")

    response = gateway.chat(**given)

    assert response.status_code == 200, response.text
    assert upstream.sampling() == asked


def test_priority_and_deadline_travel_too(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("yes")

    gateway.chat(priority=-3, deadline_ms=1500)

    assert upstream.tensors()["priority"] == b"\xfd\xff\xff\xff"
    assert upstream.tensors()["deadline_ms"] == (1500).to_bytes(4, "little")


def test_log_probabilities_stand_beside_the_chosen_tokens(upstream: Upstream, gateway: Gateway) -> None:
    tokens = [
        {
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": " car"},
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": " bus"},
        }
    ]
    upstream.play([upstream.chunk(" car", "stop", logprobs=json.dumps(tokens)), upstream.final()])

    answer = gateway.chat(logprobs=True, top_logprobs=1).json()

    assert answer["choices"][0]["logprobs"]["content"] == [
        {
            "token": " car",
            "logprob": -1.5,
            "bytes": [32, 99, 97, 114],
            "top_logprobs": [{"token": " bus", "logprob": -0.5, "bytes": [32, 98, 117, 115]}],
        }
    ]


def test_text_completions_take_the_prompt_word_for_word(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("a ", "car")

    answer = gateway.http.post(
        "/v1/completions", json={"model": "llava", "prompt": ["USER: hi"], "max_tokens": 4}
    ).json()

    assert upstream.tensors()["text_input"][4:] == b"USER: hi"
    assert upstream.sampling() == {"max_tokens": 4}
    assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", "a car")
    assert answer["usage"]["total_tokens"] == 5


def test_text_completions_stream_without_a_role(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("a ", "car")

    body = {"prompt": "USER: hi", "stream": True, "logprobs": 0}
    chunks = events_of(gateway.http.post("/v1/completions", json=body))

    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a ", "car"]  # type: ignore[index]


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(
    ("message", "status", "kind", "code", "retry_after"),
    [
        ("[INVALID_ARGUMENT] image[0]: not an image", 400, "invalid_request_error", None, None),
        (
            "[INVALID_ARGUMENT] 9 tokens; the context holds 8",
            400,
            "invalid_request_error",
            "context_length_exceeded",
            None,
        ),
        (FULL, 429, "rate_limit_error", "overloaded", "2"),
        ("[UNAVAILABLE] the decoder died", 503, "service_unavailable", "unavailable", "1"),
        ("[CANCELLED] by whom", 503, "service_unavailable", "unavailable", "1"),
        ("[DEADLINE_EXCEEDED] 100 ms passed", 504, "timeout_error", "deadline_exceeded", None),
        ("[INTERNAL] see the log", 500, "server_error", None, None),
    ],
)
def test_an_error_before_the_first_token_is_a_status_of_its_own(
    upstream: Upstream,
    gateway: Gateway,
    is_streaming: bool,
    message: str,
    status: int,
    kind: str,
    code: str | None,
    retry_after: str | None,
) -> None:
    upstream.play([upstream.fail(message), upstream.final()])

    response = gateway.chat(stream=is_streaming)

    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code)
    assert response.headers.get("retry-after") == retry_after
    assert error["message"] == message.split("] ")[1]


def test_a_server_that_is_not_there_is_a_503(start: Start) -> None:
    response = start(url="127.0.0.1:1").chat()

    assert response.status_code == 503
    assert "no server answers" in response.json()["error"]["message"]


def test_an_error_after_the_first_token_is_an_event_and_no_done(upstream: Upstream, gateway: Gateway) -> None:
    upstream.play([upstream.chunk("a "), upstream.fail("[INTERNAL] the decoder broke"), upstream.final()])

    response = gateway.chat(stream=True)

    *_, last, empty = response.text.split("\n\n")
    assert (response.status_code, empty) == (200, "")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the decoder broke"
    assert gateway.is_idle()
    assert gateway.metric("vlm_relay_gateway_stream_errors_total") == 1


def test_an_error_in_the_middle_of_a_whole_answer_is_a_status(upstream: Upstream, gateway: Gateway) -> None:
    upstream.play([upstream.chunk("a "), upstream.fail("[UNAVAILABLE] died"), upstream.final()])

    assert gateway.chat().status_code == 503


def test_tokens_are_passed_on_as_they_come(upstream: Upstream, gateway: Gateway) -> None:
    upstream.play([upstream.chunk("a "), upstream.silence()])
    body = {"messages": [{"role": "user", "content": "What?"}], "stream": True}

    with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        seen = [next(lines), next(lines), next(lines)]

    assert '"content":"a "' in seen[2]


def test_leaving_in_the_middle_of_a_stream_cancels_upstream(upstream: Upstream, gateway: Gateway) -> None:
    upstream.play([upstream.chunk("a "), upstream.silence()])
    body = {"messages": [{"role": "user", "content": "What?"}], "stream": True}

    with gateway.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())

    assert upstream.cancelled.wait(30)
    assert gateway.is_idle()
    assert gateway.metric("vlm_relay_gateway_disconnects_total") == 1


@pytest.mark.parametrize("is_streaming", [False, True])
def test_leaving_before_the_first_token_cancels_upstream(
    upstream: Upstream, gateway: Gateway, is_streaming: bool
) -> None:
    upstream.play([upstream.silence()])
    body = {"messages": [{"role": "user", "content": "What?"}], "stream": is_streaming}

    with pytest.raises(httpx.ReadTimeout):
        gateway.http.post("/v1/chat/completions", json=body, timeout=1.0)

    assert upstream.cancelled.wait(30)
    assert gateway.is_idle()
    gone = 'vlm_relay_gateway_requests_total{endpoint="/v1/chat/completions",status="499"}'
    assert gateway.metric(gone) == 1


def test_chunks_are_not_held_back_on_the_way_to_the_client(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("a ", "red ", "car")
    took_s = []

    for _ in range(21):
        began_s = time.perf_counter()
        gateway.chat(stream=True)
        took_s.append(time.perf_counter() - began_s)

    assert statistics.median(took_s) < 0.03  # Nagle's algorithm and delayed acknowledgements would make it 0.04


def test_a_chunk_without_text_still_has_content_as_vllms_clients_count_it(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("")  # nothing but special tokens

    _, last = events_of(gateway.chat(stream=True))

    assert last["choices"][0]["delta"] == {"content": ""}  # type: ignore[index]
    assert last["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]
