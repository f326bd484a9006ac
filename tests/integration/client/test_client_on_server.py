"""What the client promises, kept against a real server: the wire, the errors, the cancels, the command."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from client import AsyncRelayClient, DeadlineExceeded, InvalidRequest, RelayClient, ServerError
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION, assert_idle, metric, wait_until

pytestmark = pytest.mark.server


def _command(server: Server, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "client", "ask", "--url", f"127.0.0.1:{server.ports.grpc}", *arguments]


def _running(server: Server) -> float:
    return metric(server, "vlm_relay_in_flight_requests")


def test_the_chunks_of_a_stream_add_up_to_the_answer(client: RelayClient) -> None:
    whole = client.ask(QUESTION, images=[PICTURE], max_tokens=12, ignore_eos=True)

    with client.stream(QUESTION, images=[PICTURE], max_tokens=12, ignore_eos=True) as stream:
        chunks = list(stream)

    assert "".join(chunk.text for chunk in chunks) == whole.text == stream.answer.text
    assert sum(chunk.num_output_tokens for chunk in chunks) == whole.num_output_tokens == 12
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert stream.answer.num_input_tokens == whole.num_input_tokens > 0


def test_bytes_and_path_of_an_image_are_the_same_image(client: RelayClient) -> None:
    by_path = client.ask(QUESTION, images=[str(PICTURE)], max_tokens=8)
    by_bytes = client.ask(QUESTION, images=[PICTURE.read_bytes()], max_tokens=8)

    assert by_path.text == by_bytes.text


def test_every_token_has_its_alternatives_when_asked_for(client: RelayClient) -> None:
    answer = client.ask(QUESTION, images=[PICTURE], max_tokens=3, ignore_eos=True, logprobs=2)

    assert [len(alternatives) for alternatives in answer.logprobs] == [2, 2, 2]
    assert all(alternatives[0].logprob <= 0 for alternatives in answer.logprobs)
    assert {alternative.rank for alternatives in answer.logprobs for alternative in alternatives} == {1, 2}


def test_several_streams_of_one_client_do_not_mix(client: RelayClient) -> None:
    questions = [f"{QUESTION} {number}" for number in range(4)]
    alone = [client.ask(question, images=[PICTURE], max_tokens=8).text for question in questions]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda question: client.ask(question, images=[PICTURE], max_tokens=8).text, questions))

    assert together == alone


def test_leaving_a_stream_frees_its_place_on_the_server(client: RelayClient, server: Server) -> None:
    with client.stream(QUESTION, images=[PICTURE], max_tokens=1000, ignore_eos=True) as stream:
        next(stream)
        assert _running(server) == 1

    assert wait_until(lambda: _running(server) == 0)


def test_cancelling_an_asyncio_task_frees_its_place_on_the_server(server: Server) -> None:
    async def ask() -> None:
        async with AsyncRelayClient(f"127.0.0.1:{server.ports.grpc}") as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.ask(QUESTION, images=[PICTURE], max_tokens=1000, ignore_eos=True), 0.3)

    asyncio.run(ask())

    assert_idle(server)


def test_what_the_server_refuses_is_an_invalid_request(client: RelayClient) -> None:
    with pytest.raises(InvalidRequest, match="image"):
        client.ask(QUESTION, images=[b"not an image"])


def test_a_model_that_is_not_there_is_a_server_error_and_not_ready(server: Server) -> None:
    with RelayClient(f"127.0.0.1:{server.ports.grpc}", model="no_such_model") as client:
        assert not client.is_ready()
        with pytest.raises(ServerError, match="no_such_model"):
            client.ask(QUESTION)


def test_a_deadline_that_passes_ends_the_request(client: RelayClient) -> None:
    with pytest.raises(DeadlineExceeded):
        client.ask(QUESTION, images=[PICTURE], max_tokens=1000, ignore_eos=True, deadline_s=0.05)


def test_the_command_prints_what_the_library_gets(client: RelayClient, server: Server) -> None:
    expected = client.ask(QUESTION, images=[PICTURE], max_tokens=8)
    command = _command(server, str(PICTURE), QUESTION, "--max-tokens", "8")

    plain = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)

    assert (plain.stdout, plain.stderr) == (expected.text + "\n", "")
    printed = json.loads(told.stdout)
    assert (printed["text"], printed["num_output_tokens"]) == (expected.text, expected.num_output_tokens)
    assert printed["decision"]


def test_a_client_that_dies_frees_its_place_on_the_server(server: Server) -> None:
    program = (
        "import sys; from client import RelayClient\n"
        f"with RelayClient('127.0.0.1:{server.ports.grpc}') as client:\n"
        f"    with client.stream({QUESTION!r}, images=[{str(PICTURE)!r}], max_tokens=999, ignore_eos=True) as stream:\n"
        "        for chunk in stream:\n"
        "            print('.', end='', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)

    process.kill()
    process.communicate(timeout=30)

    assert first == "."
    assert_idle(server)
