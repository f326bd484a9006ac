"""An image and a question go in, the answer streams out: by our client and by plain ones."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton

from client import AsyncRelayClient, RelayClient
from launcher.server import Server
from tests.integration.observe import ANSWER, PICTURE, QUESTION, assert_idle, metric

RAW_PROMPT = f"USER: <image>\n{QUESTION} ASSISTANT:"


def test_the_shipped_picture_is_answered_right_and_streamed(client: RelayClient) -> None:
    with client.stream(QUESTION, images=[PICTURE]) as stream:
        texts = [chunk.text for chunk in stream]
    assert "".join(texts).strip() == ANSWER
    assert len(texts) > 1
    assert stream.answer.finish_reason == "stop"


def test_the_async_client_gets_the_same_answer(client: RelayClient, server: Server) -> None:
    async def ask() -> str:
        async with AsyncRelayClient(f"127.0.0.1:{server.ports.grpc}") as asynchronous:
            answer = await asynchronous.ask(QUESTION, images=[PICTURE])
        return answer.text

    assert asyncio.run(ask()) == client.ask(QUESTION, images=[PICTURE]).text


def test_a_text_only_request_skips_the_encoder(client: RelayClient, server: Server) -> None:
    encoded = metric(server, "nv_inference_request_success", model="clip_encoder")
    answer = client.ask("How many corners does a triangle have?", return_decision=True)
    assert answer.decision is not None
    assert answer.decision["encoder"] is None
    assert answer.decision["mode"] == "text"
    assert metric(server, "nv_inference_request_success", model="clip_encoder") == encoded


def test_the_same_image_again_is_not_encoded_again(client: RelayClient, server: Server) -> None:
    client.ask(QUESTION, images=[PICTURE], max_tokens=1)
    misses = metric(server, "vlm_relay_embedding_misses_total")
    hits = metric(server, "vlm_relay_embedding_hits_total")
    client.ask(QUESTION, images=[PICTURE], max_tokens=1)
    assert_idle(server)
    assert metric(server, "vlm_relay_embedding_misses_total") == misses
    assert metric(server, "vlm_relay_embedding_hits_total") == hits + 1


def test_several_images_are_taken_in_order(client: RelayClient) -> None:
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What is in the picture?"}]
    answer = client.ask(messages=[{"role": "user", "content": parts}], images=[PICTURE, PICTURE], max_tokens=4)
    assert answer.num_input_tokens > 2 * 576


def test_messages_and_a_question_make_the_same_prompt(client: RelayClient) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    chat = client.ask(messages=[{"role": "user", "content": parts}], images=[PICTURE])
    question = client.ask(QUESTION, images=[PICTURE])
    assert (chat.text, chat.num_input_tokens) == (question.text, question.num_input_tokens)


def test_stock_grpc_streaming_with_the_inputs_of_the_vllm_backend(server: Server) -> None:
    flags = (
        "stream",
        "exclude_input_in_output",
        "return_finish_reason",
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
    )
    inputs = [
        _bytes("text_input", RAW_PROMPT.encode()),
        _bytes("image", base64.b64encode(PICTURE.read_bytes())),
        _bytes("sampling_parameters", json.dumps({"temperature": "0", "max_tokens": "100", "logprobs": 2}).encode()),
        *(_flag(name) for name in flags),
    ]
    results = list(_stream(server, inputs))
    text = b"".join(result.as_numpy("text_output")[0] for result in results).decode()
    assert text.strip() == ANSWER
    reasons = [result.as_numpy("finish_reason")[0].decode() for result in results]
    assert reasons == ["None"] * (len(results) - 1) + ["stop"]
    assert {int(result.as_numpy("num_input_tokens")[0]) for result in results} == {
        576 + len(_prompt_ids(RAW_PROMPT)) - 1
    }
    tokens = [json.loads(result.as_numpy("logprobs")[0]) for result in results]
    counts = [int(result.as_numpy("num_output_tokens")[0]) for result in results]
    assert [len(items) for items in tokens] == counts
    logprob = 0.0
    for items in tokens:
        for alternatives in items:
            best = next(iter(alternatives.values()))
            assert best["rank"] == 1
            assert set(best) == {"logprob", "rank", "decoded_token"}
            logprob += best["logprob"]
    assert float(results[-1].as_numpy("cumulative_logprob")[0]) == pytest.approx(logprob, abs=1e-3)
    assert_idle(server)


def test_generate_with_curl_answers_once_and_repeats_a_raw_prompt(server: Server) -> None:
    body = {"text_input": RAW_PROMPT, "image": base64.b64encode(PICTURE.read_bytes()).decode(), "temperature": 0}
    answer = json.loads(_curl(server, "generate", body))
    assert answer["model_name"] == "llava"
    assert answer["text_output"].startswith(RAW_PROMPT)
    assert answer["text_output"].removeprefix(RAW_PROMPT).strip() == ANSWER
    assert_idle(server)


def test_generate_stream_with_curl_sends_events(server: Server) -> None:
    body = {
        "text_input": QUESTION,
        "image": "data:image/jpeg;base64," + base64.b64encode(PICTURE.read_bytes()).decode(),
        "stream": True,
        "max_tokens": 30,
    }
    events = [
        json.loads(line.removeprefix("data: "))
        for line in _curl(server, "generate_stream", body).splitlines()
        if line.startswith("data: ")
    ]
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events).strip() == ANSWER
    assert_idle(server)


def _prompt_ids(text: str) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained("demo/checkpoint").encode(text))


def _bytes(name: str, *values: bytes) -> triton.InferInput:
    tensor = triton.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=np.object_))
    return tensor


def _flag(name: str) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([True]))
    return tensor


def _stream(server: Server, inputs: list[triton.InferInput]) -> Iterator[triton.InferResult]:
    """The responses of one request by tritonclient's own streaming, up to the final flag."""
    import queue

    responses: queue.Queue[tuple[triton.InferResult, Exception | None]] = queue.Queue()
    with triton.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as stock:
        stock.start_stream(lambda result, error: responses.put((result, error)))
        stock.async_stream_infer("llava", inputs, enable_empty_final_response=True)
        while True:
            result, error = responses.get(timeout=30)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                yield result
            if response.parameters["triton_final_response"].bool_param:
                break
        stock.stop_stream()


def _curl(server: Server, verb: str, body: dict[str, object]) -> str:
    command = ["curl", "--silent", "--no-buffer", "--max-time", "30", "-H", "Content-Type: application/json"]
    url = f"http://127.0.0.1:{server.ports.http}/v2/models/llava/{verb}"
    done = subprocess.run(
        [*command, "--data-binary", "@-", url], input=json.dumps(body), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
