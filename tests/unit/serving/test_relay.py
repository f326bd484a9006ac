"""The life of one request: its order, its replies, its errors, and that nothing of it stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from python_backend.errors import (
    EmbeddingGone,
    HandleRefused,
    InternalError,
    InvalidImage,
    InvalidPrompt,
    Overloaded,
    PeerGone,
)
from python_backend.generate import Returns
from python_backend.relay import MAX_ATTEMPTS
from python_backend.stream import Chunk, DecodeJob
from scheduler.decision import Decision
from scheduler.loads import RequestShape
from scheduler.profile import DecodeTable
from tests.unit.serving.conftest import StartRelay, settle
from tests.unit.serving.fakes import FakeClient, Gate, World, chunk


def raising(error: Exception, *before: Chunk) -> Callable[[DecodeJob], Iterator[Chunk]]:
    """A decoder that gives some chunks and then breaks."""

    def answer(_job: DecodeJob) -> Iterator[Chunk]:
        yield from before
        raise error

    return answer


def test_a_request_is_encoded_then_decoded_then_released(world: World) -> None:
    client = world.ask("hello", b"a")

    assert client.wait() == ["'one' None", "' two' None", "'' stop"]
    settle()
    assert world.stages.log == ["encode a on e", "decode hello with [<a>] on d", "release <a>"]


def test_text_alone_needs_no_encoder(start_relay: StartRelay) -> None:
    world = start_relay(encoders=())

    client = world.ask("hello")

    assert client.wait() == ["'one' None", "' two' None", "'' stop"]
    assert world.stages.log == ["decode hello with [] on d"]


def test_handles_keep_the_order_of_the_images(world: World) -> None:
    gate = world.stages.encode_gates[b"a"] = Gate()
    client = world.ask("hello", b"a", b"b", b"c")
    gate.wait_reached()
    gate.open()  # the first image is encoded last

    client.wait()

    assert world.stages.jobs[0].handles == (b"<a>", b"<b>", b"<c>")


@pytest.mark.parametrize("error", [InvalidImage("bad"), ValueError("a bug")], ids=["refused", "bug"])
def test_one_bad_image_gives_the_leases_of_the_others_back(world: World, error: Exception) -> None:
    world.stages.encode_errors[b"a"] = error

    client = world.ask("hello", b"a", b"b", b"c")

    client.wait()
    settle()
    assert sorted(world.stages.log) == [
        "encode a on e",
        "encode b on e",
        "encode c on e",
        "release <b>",
        "release <c>",
    ]


def test_a_lease_that_cannot_be_given_back_keeps_no_other(world: World) -> None:
    world.stages.release_errors[b"<a>"] = PermissionError("not ours")

    assert world.ask("hello", b"a", b"b").wait()[-1] == "'' stop"

    settle()
    assert sorted(world.stages.log)[-2:] == ["release <a>", "release <b>"]


def is_retried(error: Exception) -> bool:
    """Whether the request is tried again: another replica, or another encode, may help."""
    return isinstance(error, PeerGone | EmbeddingGone)


ERRORS = [
    (EmbeddingGone("evicted"), "[UNAVAILABLE] evicted"),
    (PeerGone("d: not ready"), "[UNAVAILABLE] d: not ready; retry after 5 s"),
    (Overloaded("the store is full", 2.5), "[UNAVAILABLE] the store is full; retry after 2.5 s"),
    (InternalError("a bug"), "[INTERNAL] a bug"),
    (KeyError("never shown"), "[INTERNAL] the scheduler failed: KeyError"),
]


@pytest.mark.parametrize(
    ("error", "told"), [(InvalidImage("too dark"), "[INVALID_ARGUMENT] image[0]: too dark"), *ERRORS]
)
def test_what_the_encoder_raises_reaches_the_client(world: World, error: Exception, told: str) -> None:
    world.stages.encode_errors[b"a"] = error

    assert world.ask("hello", b"a").wait() == [told]


def test_a_bad_image_among_several_is_named(world: World) -> None:
    world.stages.encode_errors[b"b"] = InvalidImage("too dark")

    assert world.ask("hello", b"a", b"b").wait() == ["[INVALID_ARGUMENT] image[1]: too dark"]


@pytest.mark.parametrize(("error", "told"), [(HandleRefused("forged"), "[INVALID_ARGUMENT] forged"), *ERRORS])
def test_what_the_decoder_raises_reaches_the_client(world: World, error: Exception, told: str) -> None:
    world.stages.answer = raising(error, chunk("one"))

    told_before = ["'one' None"] * (MAX_ATTEMPTS if is_retried(error) else 1)
    assert world.ask("hello", b"a").wait() == [*told_before, told]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidPrompt("no text"), "[INVALID_ARGUMENT] no text"),
        (OSError("never shown"), "[INTERNAL] the scheduler failed: OSError"),
    ],
)
def test_a_refused_prompt_touches_no_stage(world: World, error: Exception, told: str) -> None:
    world.prompts.errors["hello"] = error

    assert world.ask("hello", b"a").wait() == [told]
    assert world.stages.log == []


@pytest.mark.parametrize(
    ("encoders", "decoders", "images"), [((), ("d",), (b"a",)), (("e",), (), ())], ids=["no encoder", "no decoder"]
)
def test_a_stage_without_replicas_ends_the_request(
    start_relay: StartRelay, encoders: tuple[str, ...], decoders: tuple[str, ...], images: tuple[bytes, ...]
) -> None:
    world = start_relay(encoders=encoders, decoders=decoders)

    stage = "decoder" if encoders else "encoder"
    assert world.ask("hello", *images).wait() == [
        f"[UNAVAILABLE] no {stage} is available just now: it died and is being restarted; retry after 5 s"
    ]


def test_an_answer_without_an_end_is_an_error(world: World) -> None:
    world.stages.answer = lambda _job: iter([chunk("one")])

    assert world.ask("hello").wait() == [
        *["'one' None"] * MAX_ATTEMPTS,
        "[UNAVAILABLE] d ended the stream without finishing the answer; retry after 5 s",
    ]


def test_nothing_follows_the_finish_reason(world: World) -> None:
    world.stages.answer = lambda _job: iter([chunk("one", "stop"), chunk(" more")])

    assert world.ask("hello").wait() == ["'one' stop"]
    settle()
    assert world.clients[0].log == ["'one' stop"]


def test_a_client_that_does_not_stream_gets_one_reply(world: World) -> None:
    client = world.ask("hello", streaming=False)

    assert client.wait() == ["'one two' stop"]
    assert client.replies[0].chunk == chunk("one two", "stop")


def test_tokens_without_text_travel_with_the_next_text(world: World) -> None:
    world.stages.answer = lambda _job: iter(
        [
            Chunk((1,), "", None, ({"1": 1},), -0.5),
            Chunk((2,), "é", None, ({"2": 2},), -1.5),
            Chunk((3,), "", "length", ({"3": 3},), -2.5),
        ]
    )

    client = world.ask("hello")

    client.wait()
    assert [reply.chunk for reply in client.replies] == [
        Chunk((1, 2), "é", None, ({"1": 1}, {"2": 2}), -1.5),
        Chunk((3,), "", "length", ({"3": 3},), -2.5),
    ]


def test_the_decision_is_on_the_first_reply_only_and_only_when_asked_for(world: World) -> None:
    asked = world.ask("hello", b"a", returns=Returns(decision=True))
    asked.wait()
    settle()
    silent = world.ask("hello")
    silent.wait()

    first, *later = [reply.decision for reply in asked.replies]
    assert isinstance(first, Decision)
    assert (first.encoders, first.decoder, first.mode, first.reason_kind) == (("e",), "d", "split", "only")
    assert later == [None, None]
    assert [reply.decision for reply in silent.replies] == [None, None, None]


def test_a_cumulative_logprob_makes_the_decoder_report_log_probabilities(world: World) -> None:
    world.ask("with", returns=Returns(cumulative_logprob=True)).wait()
    settle()
    world.ask("without").wait()

    assert [job.sampling.logprobs for job in world.stages.jobs] == [0, None]


def test_the_deadline_goes_to_the_decoder_on_the_servers_clock(world: World) -> None:
    world.ask("hello", deadline_s=7.5).wait()

    assert world.stages.jobs[0].deadline_s == 1007.5


def test_load_counts_while_a_request_is_served(start_relay: StartRelay) -> None:
    world = start_relay(encoders=("e0", "e1"), decoders=("d0", "d1"))
    _, first = world.hold("a", b"1")
    _, second = world.hold("b", b"2")
    first.open()
    second.open()
    settle()

    assert sorted(world.stages.log)[:4] == [
        "decode a with [<1>] on d0",
        "decode b with [<2>] on d1",
        "encode 1 on e0",
        "encode 2 on e0",  # which had done the first one
    ]


def test_an_encoder_counts_as_busy_until_it_has_encoded(start_relay: StartRelay) -> None:
    world = start_relay(encoders=("e0", "e1"))
    gate = world.stages.encode_gates[b"1"] = Gate()
    first = world.ask("a", b"1")
    gate.wait_reached()

    world.ask("b", b"2").wait()
    gate.open()
    first.wait()

    assert sorted(world.stages.log)[2:4] == ["encode 1 on e0", "encode 2 on e1"]


def test_several_images_are_encoded_side_by_side(start_relay: StartRelay) -> None:
    world = start_relay(encoders=("e0", "e1"))

    world.ask("a", b"1", b"2", b"3", b"4").wait()

    assert sorted(world.stages.log)[1:5] == ["encode 1 on e0", "encode 2 on e1", "encode 3 on e0", "encode 4 on e1"]
    assert world.stages.jobs[0].handles == (b"<1>", b"<2>", b"<3>", b"<4>")


def test_nobody_is_sent_to_a_full_decoder(start_relay: StartRelay) -> None:
    world = start_relay(decode=DecodeTable(max_sequences=1, max_waiting=1), max_in_flight=9, max_waiting=9)
    _, first = world.hold("first")
    _, second = world.hold("second")

    waiting = [world.ask("later", b"1", priority=1), world.ask("next", b"2")]
    assert world.stages.log == ["decode first with [] on d", "decode second with [] on d"]
    first.open()
    waiting[1].wait()
    decodes = [line for line in world.stages.log if line.startswith("decode")]
    second.open()
    waiting[0].wait()

    assert decodes[2] == "decode next with [<2>] on d"


def test_what_a_decoder_has_read_brings_the_next_turn_to_it(start_relay: StartRelay) -> None:
    world = start_relay(decoders=("d0", "d1"))
    turn = "a question that is long enough to fill some blocks of the cache. "
    _, gate = world.hold("busy")  # on d0
    world.ask(turn, b"1").wait()
    gate.open()
    settle()

    world.ask(turn + "and the next one", b"1").wait()

    assert [line.split()[-1] for line in world.stages.log if line.startswith("decode")] == ["d0", "d1", "d1"]


def test_predictions_follow_what_was_observed(start_relay: StartRelay) -> None:
    world = start_relay()
    router = world.relay._placing._router

    def slow(_job: DecodeJob) -> Iterator[Chunk]:
        yield chunk("a")
        world.clock.advance(1.0)
        yield chunk("0123456789", "stop")

    world.stages.answer = slow
    for _ in range(20):
        world.ask("x").wait()
        settle()

    predicted_s = router.decide(RequestShape(0, 1, 10), world.relay._placing.loads).step_s
    assert predicted_s == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("where", ["reply", "last"])
def test_a_client_that_breaks_off_ends_only_itself(start_relay: StartRelay, where: str) -> None:
    world = start_relay(max_in_flight=1)
    broken = FakeClient("broken")
    broken.breaks_at = where

    world.ask("broken", b"a", client=broken).wait()
    after = world.ask("after")

    assert after.wait() == ["'one' None", "' two' None", "'' stop"]
    assert broken.error is not None
    assert str(broken.error) == "[INTERNAL] the scheduler failed: BrokenPipeError"


def test_a_client_that_cannot_be_told_of_an_error_gives_its_place_back(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1)
    broken = FakeClient("broken")
    broken.breaks_at = "fail"
    world.stages.encode_errors[b"a"] = InvalidImage("bad")

    world.ask("broken", b"a", client=broken).wait()

    assert world.ask("after").wait() == ["'one' None", "' two' None", "'' stop"]


def test_outcomes_are_counted(world: World) -> None:
    world.ask("fine", b"a").wait()
    settle()
    world.stages.encode_errors[b"b"] = InvalidImage("bad")
    world.ask("refused", b"b").wait()
    settle()

    assert world.meter.counters == {
        "vlm_relay_admitted_total": 2.0,
        "vlm_relay_decisions_total mode=split reason=only": 2.0,
        "vlm_relay_requests_total outcome=ok": 1.0,
        "vlm_relay_requests_total outcome=INVALID_ARGUMENT": 1.0,
    }
    queued = "vlm_relay_queue_seconds"
    assert world.meter.observed == [queued, "vlm_relay_ttft_seconds", "vlm_relay_request_seconds", queued]
    assert world.meter.gauges == {"vlm_relay_in_flight_requests": 0, "vlm_relay_waiting_requests": 0}
