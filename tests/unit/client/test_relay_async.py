from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import grpc
import pytest

from client import (
    AsyncRelayClient,
    Cancelled,
    Chunk,
    DeadlineExceeded,
    Overloaded,
    RelayClientError,
    ServerError,
    ServerUnreachable,
)
from tests.unit.client.scripted import ScriptedServer

FULL = "[UNAVAILABLE] the queue is full; retry after 0.5 s"


class NoChance(random.Random):
    """Adds nothing to a pause."""

    def random(self) -> float:
        return 0.0


def _run(server: ScriptedServer, use: Callable[[AsyncRelayClient], Awaitable[None]], **options: float) -> None:
    async def with_client() -> None:
        async with AsyncRelayClient(server.address, **options) as client:
            await use(client)

    asyncio.run(with_client())


def test_ask_gathers_the_whole_answer(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.chunk("car", "stop"), server.final()])

    async def use(client: AsyncRelayClient) -> None:
        answer = await client.ask("What?", images=[b"image"])
        assert (answer.text, answer.finish_reason, answer.num_output_tokens) == ("a car", "stop", 2)

    _run(server, use)

    assert not server.cancelled.is_set()


def test_a_stream_gives_chunks_as_they_come(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.chunk("car", "length"), server.final()])

    async def use(client: AsyncRelayClient) -> None:
        async with client.stream("What?") as stream:
            chunks = [chunk async for chunk in stream]
        assert chunks == [Chunk("a ", None, 1), Chunk("car", "length", 1)]
        assert stream.answer.text == "a car"

    _run(server, use)


def test_streams_of_one_client_run_side_by_side(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.chunk("car", "stop"), server.final()])

    async def use(client: AsyncRelayClient) -> None:
        answers = await asyncio.gather(*(client.ask("What?") for _ in range(8)))
        assert [answer.text for answer in answers] == ["a car"] * 8

    _run(server, use)


def test_leaving_a_stream_early_cancels_on_the_server(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.silence()])

    async def use(client: AsyncRelayClient) -> None:
        async with client.stream("What?") as stream:
            async for _ in stream:
                break
        assert await asyncio.to_thread(server.cancelled.wait, 5)

    _run(server, use)


@pytest.mark.parametrize("is_failed", [False, True])
def test_an_answer_at_its_end_is_not_cancelled(server: ScriptedServer, is_failed: bool) -> None:
    last = server.fail("[INTERNAL] broken") if is_failed else server.chunk("a car", "stop")
    server.play([last, server.late(server.final())])

    async def use(client: AsyncRelayClient) -> None:
        with contextlib.suppress(ServerError):
            async with client.stream("What?") as stream:
                async for _ in stream:
                    break

    _run(server, use)

    assert server.all_calls_ended()
    assert not server.cancelled.is_set()


def test_cancelling_the_task_cancels_on_the_server(server: ScriptedServer) -> None:
    server.play([server.silence()])

    async def use(client: AsyncRelayClient) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.ask("What?"), 0.1)
        assert await asyncio.to_thread(server.cancelled.wait, 5)

    _run(server, use)


def test_closing_from_another_task_ends_a_waiting_stream(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.silence()])

    async def use(client: AsyncRelayClient) -> None:
        async with client.stream("What?") as stream:
            await anext(stream)
            asyncio.get_running_loop().call_later(0.05, stream.close)
            with pytest.raises(Cancelled, match="closed before the answer was complete"):
                await anext(stream)

    _run(server, use)


@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        (grpc.StatusCode.CANCELLED, "the server says so", Cancelled),
        (grpc.StatusCode.UNAVAILABLE, FULL, Overloaded),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", ServerUnreachable),
        (grpc.StatusCode.INTERNAL, "no idea", ServerError),
    ],
)
def test_a_status_in_place_of_a_message_is_understood(
    server: ScriptedServer, status: grpc.StatusCode, details: str, kind: type[RelayClientError]
) -> None:
    server.play([server.abort(status, details)])

    async def use(client: AsyncRelayClient) -> None:
        with pytest.raises(kind):
            await client.ask("What?")

    _run(server, use)


def test_an_error_in_the_middle_keeps_what_had_come(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.fail("[INTERNAL] the decoder broke"), server.silence()])

    async def use(client: AsyncRelayClient) -> None:
        async with client.stream("What?") as stream:
            await anext(stream)
            with pytest.raises(ServerError, match=r"^the decoder broke$"):
                await anext(stream)
        assert stream.answer.text == "a "

    _run(server, use)


def test_an_end_without_the_final_response_is_an_error(server: ScriptedServer) -> None:
    server.play([server.chunk("a ")])

    async def use(client: AsyncRelayClient) -> None:
        with pytest.raises(ServerError, match="without its final response"):
            await client.ask("What?")

    _run(server, use)


def test_a_server_that_never_answers_ends_at_the_deadline(server: ScriptedServer) -> None:
    server.play([server.silence()])

    async def use(client: AsyncRelayClient) -> None:
        with pytest.raises(DeadlineExceeded):
            await client.ask("What?", deadline_s=0.1)

    _run(server, use, deadline_grace_s=0.1)


def test_an_overloaded_server_is_asked_again_after_its_hint(server: ScriptedServer) -> None:
    server.play([server.fail(FULL), server.final()], [server.chunk("a car", "stop"), server.final()])
    pauses: list[float] = []

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)

    async def use() -> None:
        async with AsyncRelayClient(server.address, retries=1, sleep=note, chance=NoChance()) as client:
            assert (await client.ask("What?")).text == "a car"

    asyncio.run(use())

    assert pauses == [0.5]


def test_a_refused_connection_is_an_unreachable_server() -> None:
    async def use() -> None:
        async with AsyncRelayClient("127.0.0.1:1") as client:
            assert await client.is_ready() is False
            with pytest.raises(ServerUnreachable, match=r"at 127\.0\.0\.1:1; start one with"):
                await client.ask("What?")

    asyncio.run(use())


def test_ready_means_that_the_server_answers_with_its_model_loaded(server: ScriptedServer) -> None:
    async def use(client: AsyncRelayClient) -> None:
        loaded = await client.is_ready()
        server.is_model_ready = False
        assert (loaded, await client.is_ready()) == (True, False)

    _run(server, use)
