from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import grpc
import pytest

from client import (
    Cancelled,
    Chunk,
    DeadlineExceeded,
    ImageNotReadable,
    InvalidRequest,
    Overloaded,
    Progress,
    RelayClient,
    ServerError,
    ServerUnreachable,
    Unavailable,
)
from tests.unit.client.scripted import ScriptedServer

FULL = "[UNAVAILABLE] the queue is full; retry after 0.5 s"


class Ticks:
    """A clock that moves by one second at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class NoChance(random.Random):
    """Adds nothing to a pause."""

    def random(self) -> float:
        return 0.0


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[RelayClient]:
    with RelayClient(server.address) as lent:
        yield lent


def test_ask_gathers_the_whole_answer(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a "), server.chunk("red "), server.chunk("car", "stop"), server.final()])

    answer = client.ask("What?", images=[b"image"])

    assert (answer.text, answer.finish_reason) == ("a red car", "stop")
    assert (answer.num_input_tokens, answer.num_output_tokens) == (3, 3)


def test_a_stream_gives_chunks_as_they_come(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a "), server.chunk("car"), server.chunk("", "length"), server.final()])

    with client.stream("What?") as stream:
        chunks = list(stream)

    assert chunks == [Chunk("a ", None, 1), Chunk("car", None, 1), Chunk("", "length", 1)]


def test_a_final_mark_on_the_last_chunk_ends_the_answer_too(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a car", "stop", is_final=True)])

    assert client.ask("What?").text == "a car"


def test_a_complete_answer_is_not_cancelled(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a car", "stop"), server.final()])

    client.ask("What?")

    assert server.all_calls_ended()
    assert not server.cancelled.is_set()


def test_a_failed_answer_is_read_to_its_end_and_not_cancelled(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.fail("[INTERNAL] the decoder broke"), server.late(server.final())])

    with pytest.raises(ServerError):
        client.ask("What?")

    assert server.all_calls_ended()
    assert not server.cancelled.is_set()


def test_leaving_at_the_last_chunk_lets_the_server_finish(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a car", "stop"), server.late(server.final())])

    with client.stream("What?") as stream:
        for _ in stream:
            break

    assert server.all_calls_ended()
    assert not server.cancelled.is_set()


def test_the_answer_so_far_can_be_read_while_it_streams(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a ", decision='{"mode":"serial"}'), server.chunk("car", "stop"), server.final()])

    with client.stream("What?", return_decision=True) as stream:
        before = stream.answer
        next(stream)
        begun = stream.answer
        list(stream)

    assert (before.text, before.ttft_s, before.finish_reason) == ("", None, None)
    assert (begun.text, begun.finish_reason, begun.decision) == ("a ", None, {"mode": "serial"})
    assert (stream.answer.text, stream.answer.finish_reason) == ("a car", "stop")
    assert stream.answer.decision == {"mode": "serial"}


def test_times_run_from_sending_to_the_first_and_to_the_last_chunk(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.chunk("red "), server.chunk("car", "stop", is_final=True)])

    with RelayClient(server.address, clock=Ticks()) as client:
        answer = client.ask("What?")

    assert (answer.ttft_s, answer.total_s, answer.output_tokens_per_s) == (1.0, 3.0, 1.0)


def test_leaving_a_stream_early_cancels_on_the_server(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a "), server.silence()])

    with client.stream("What?") as stream:
        for _ in stream:
            break

    assert server.cancelled.wait(30)


def test_closing_from_another_thread_ends_a_waiting_stream(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a "), server.silence()])

    with client.stream("What?") as stream:
        next(stream)
        threading.Timer(0.05, stream.close).start()
        with pytest.raises(Cancelled, match="closed before the answer was complete"):
            next(stream)

    assert server.cancelled.wait(30)


def test_closing_the_client_ends_its_streams(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.silence()])
    client = RelayClient(server.address)

    with client.stream("What?") as stream:
        next(stream)
        client.close()
        with pytest.raises(Cancelled):
            next(stream)


def test_streams_of_one_client_run_side_by_side(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("first "), server.chunk("car", "stop"), server.final()])

    with client.stream("What?") as one, client.stream("What?") as two, client.stream("What?") as three:
        chunks = [next(stream).text for stream in (one, two, three, one, two, three)]
        rest = [list(stream) for stream in (three, one, two)]

    assert chunks == ["first ", "first ", "first ", "car", "car", "car"]
    assert rest == [[], [], []]


def test_an_error_in_the_middle_keeps_what_had_come(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a "), server.fail("[INTERNAL] the decoder broke"), server.final()])

    with client.stream("What?") as stream:
        next(stream)
        with pytest.raises(ServerError, match=r"^the decoder broke$"):
            next(stream)

    assert stream.answer.text == "a "
    assert stream.answer.finish_reason is None


def test_an_error_that_is_not_followed_by_an_end_leaves_no_call_open(
    server: ScriptedServer, client: RelayClient
) -> None:
    server.play([server.fail("[INVALID_ARGUMENT] max_tokens must be above 0"), server.silence()])

    with pytest.raises(InvalidRequest, match="max_tokens"):
        client.ask("What?", max_tokens=0)

    assert server.cancelled.wait(30)


def test_an_end_without_the_final_response_is_an_error(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a ")])

    with pytest.raises(ServerError, match="without its final response"):
        client.ask("What?")


def test_a_status_in_place_of_a_message_is_understood(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.abort(grpc.StatusCode.UNAVAILABLE, FULL)])

    with pytest.raises(Overloaded) as caught:
        client.ask("What?")

    assert caught.value.retry_after_s == 0.5


def test_a_server_that_breaks_off_is_named_as_lost(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.chunk("a "), server.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")])

    with pytest.raises(ServerUnreachable, match=f"lost the server at {server.address}"):
        client.ask("What?")


def test_a_server_that_never_answers_ends_at_the_deadline(server: ScriptedServer) -> None:
    server.play([server.silence()])

    with RelayClient(server.address, deadline_grace_s=0.1) as client, pytest.raises(DeadlineExceeded):
        client.ask("What?", deadline_s=0.1)

    assert server.cancelled.wait(30)


def test_a_missing_image_is_told_before_anything_is_sent(server: ScriptedServer, client: RelayClient) -> None:
    with pytest.raises(ImageNotReadable, match="no-such"):
        client.ask("What?", images=["no-such.jpg"])

    assert server.requests == []


def test_an_overloaded_server_is_asked_again_after_its_hint(server: ScriptedServer) -> None:
    server.play(
        [server.fail(FULL), server.final()],
        [server.fail(FULL), server.final()],
        [server.chunk("a car", "stop"), server.final()],
    )
    pauses: list[float] = []

    with RelayClient(server.address, retries=2, sleep=pauses.append, chance=NoChance()) as client:
        answer = client.ask("What?")

    assert answer.text == "a car"
    assert pauses == [0.5, 0.5]
    assert len(server.requests) == 3


def test_without_retries_an_overload_is_raised_at_once(server: ScriptedServer, client: RelayClient) -> None:
    server.play([server.fail(FULL), server.final()])

    with pytest.raises(Overloaded, match="the queue is full"):
        client.ask("What?")

    assert len(server.requests) == 1


def test_an_answer_that_has_begun_is_never_asked_for_again(server: ScriptedServer) -> None:
    server.play([server.chunk("a "), server.fail("[UNAVAILABLE] the decoder died"), server.final()])

    with RelayClient(server.address, retries=5, sleep=pytest.fail) as client, pytest.raises(Unavailable):
        client.ask("What?")

    assert len(server.requests) == 1


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED"])
def test_only_an_overload_is_retried(server: ScriptedServer, code: str) -> None:
    server.play([server.fail(f"[{code}] no"), server.final()])

    with (
        RelayClient(server.address, retries=5, sleep=pytest.fail) as client,
        pytest.raises(Exception, match="no"),
    ):
        client.ask("What?")

    assert len(server.requests) == 1


def test_a_refused_connection_is_an_unreachable_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        with (
            RelayClient(address) as client,
            pytest.raises(ServerUnreachable, match=f"at {address}; start one with"),
        ):
            client.ask("What?")


def test_a_port_that_accepts_and_says_nothing_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        with RelayClient(address, connect_timeout_s=0.2) as client, pytest.raises(ServerUnreachable):
            client.ask("What?")


def test_ready_means_that_the_server_answers_with_its_model_loaded(server: ScriptedServer, client: RelayClient) -> None:
    loaded = client.is_ready()
    server.is_model_ready = False

    assert (loaded, client.is_ready()) == (True, False)


def test_nothing_is_ready_where_nothing_listens() -> None:
    with RelayClient("127.0.0.1:1") as client:
        assert client.is_ready() is False


def test_a_stream_must_be_entered(client: RelayClient) -> None:
    with pytest.raises(RuntimeError, match="enter the stream first"):
        next(client.stream("What?"))


def test_progress_is_told_as_it_comes_and_is_no_text(server: ScriptedServer) -> None:
    decision = '{"decoder":"d"}'
    server.play(
        [
            server.chunk(progress="placed", decision=decision),
            server.chunk(progress="encoded"),
            server.chunk("a car", "stop"),
            server.final(),
        ]
    )
    told: list[Progress | str] = []

    with RelayClient(server.address) as client, client.stream("What?", on_progress=told.append) as stream:
        told.extend(chunk.text for chunk in stream)

    assert told == [Progress("placed", {"decoder": "d"}), Progress("encoded", None), "a car"]
    assert (stream.answer.num_output_tokens, stream.answer.decision) == (1, {"decoder": "d"})
    assert "return_progress" in [each.name for each in server.requests[0].inputs]


def test_a_request_that_was_only_placed_is_sent_again_when_its_stage_is_gone(server: ScriptedServer) -> None:
    gone = [server.chunk(progress="placed"), server.fail("[UNAVAILABLE] died; retry after 0 s"), server.final()]
    server.play(gone, [server.chunk("a car", "stop"), server.final()])

    with RelayClient(server.address, retries=1) as client, client.stream("What?", on_progress=print) as stream:
        assert [chunk.text for chunk in stream] == ["a car"]
