"""The real openai package against the gateway and the real server."""

from __future__ import annotations

import base64

import openai
import pytest

from client import RelayClient
from client.gateway.settings import Settings
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION
from tests.unit.gateway.conftest import Gateway

pytestmark = pytest.mark.server

URI = "data:image/jpeg;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
IMAGE = {"type": "image_url", "image_url": {"url": URI}}
MESSAGES = [{"role": "user", "content": [IMAGE, {"type": "text", "text": QUESTION}]}]
TEXT_ONLY = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture
def direct(server: Server) -> str:
    """What the server itself answers to QUESTION about PICTURE, in at most 20 tokens."""
    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client:
        return client.ask(QUESTION, images=[PICTURE], max_tokens=20).text


def _create(client: openai.OpenAI, **more: object) -> object:
    given = {"model": "llava", "messages": MESSAGES, "max_tokens": 20, **more}
    return client.chat.completions.create(**given)  # type: ignore[call-overload]


def test_a_picture_is_answered_as_the_server_itself_answers(client_of_openai: openai.OpenAI, direct: str) -> None:
    answer = _create(client_of_openai)

    assert answer.choices[0].message.content == direct  # type: ignore[attr-defined]
    assert answer.usage.prompt_tokens > 576  # type: ignore[attr-defined]  # image tokens count
    assert 0 < answer.usage.completion_tokens <= 20  # type: ignore[attr-defined]


def test_a_stream_says_the_same_in_pieces_and_ends_with_usage(client_of_openai: openai.OpenAI, direct: str) -> None:
    *chunks, last = list(_create(client_of_openai, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == direct
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert last.usage.prompt_tokens > 576


def test_images_of_several_turns_all_count(client_of_openai: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "a circle"}, *MESSAGES]

    answer = _create(client_of_openai, messages=messages, max_tokens=2)

    assert 2 * 576 < answer.usage.prompt_tokens < 3 * 576  # type: ignore[attr-defined]


def test_the_same_seed_gives_the_same_answer(client_of_openai: openai.OpenAI) -> None:
    first, second = (_create(client_of_openai, temperature=1.5, seed=7) for _ in range(2))

    assert first.choices[0].message.content == second.choices[0].message.content  # type: ignore[attr-defined]


def test_every_token_has_its_log_probability(client_of_openai: openai.OpenAI) -> None:
    answer = _create(client_of_openai, max_tokens=3, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True})

    content = answer.choices[0].logprobs.content  # type: ignore[attr-defined]
    assert len(content) == 3
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content)
    assert all(token.top_logprobs[0].token == token.token for token in content)  # greedy


def test_min_tokens_and_max_completion_tokens_bound_the_answer(client_of_openai: openai.OpenAI) -> None:
    bounds = {"min_tokens": 7, "ignore_eos": True}

    answer = client_of_openai.chat.completions.create(
        model="llava",
        messages=TEXT_ONLY,
        max_completion_tokens=7,
        extra_body=bounds,  # type: ignore[arg-type]
    )

    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (7, "length")


def test_text_completions_take_a_raw_prompt(client_of_openai: openai.OpenAI, server: Server) -> None:
    prompt = "USER: Who are you? ASSISTANT:"
    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client:
        direct = client.ask(prompt, raw=True, max_tokens=10).text

    answer = client_of_openai.completions.create(model="llava", prompt=prompt, max_tokens=10)

    assert answer.choices[0].text == direct


def test_the_model_is_listed(client_of_openai: openai.OpenAI) -> None:
    assert [model.id for model in client_of_openai.models.list()] == ["llava"]


@pytest.mark.parametrize(
    ("given", "kind", "code", "words"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, "model_not_found", "does not exist"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,AA=="}}]}
                ]
            },
            openai.BadRequestError,
            None,
            "image[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE] * 4}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "the context holds",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, None, "tools"),
        ({"extra_body": {"deadline_ms": 1}}, openai.InternalServerError, "deadline_exceeded", "deadline"),
    ],
)
def test_errors_arrive_as_the_packages_own_exceptions(
    client_of_openai: openai.OpenAI, given: dict[str, object], kind: type[openai.APIStatusError], code: str, words: str
) -> None:
    with pytest.raises(kind) as caught:
        _create(client_of_openai, stream=True, **given)

    assert caught.value.code == code
    assert words in caught.value.message


def test_a_wrong_key_is_an_authentication_error(server: Server) -> None:
    gateway = Gateway(Settings(url=f"127.0.0.1:{server.ports.grpc}", api_keys=frozenset({"right"})))
    try:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            assert len(list(client.with_options(api_key="right").models.list())) == 1
    finally:
        gateway.close()
