"""The watch: cancels, deadlines and silence end a request once, and tell the decoder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from python_backend.stream import Chunk, DecodeJob, Reply
from tests.unit.serving.conftest import StartRelay, settle
from tests.unit.serving.fakes import PATIENCE_S, FakeClient, Gate, World, chunk

CANCELLED = "[CANCELLED] the client cancelled the request or went away"
A_POLL_S = 0.11  # the watch asks clients every 0.1 s


def test_a_cancel_while_decoding_tells_the_decoder_and_gives_the_place_back(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1)
    client, gate = world.hold("hello", b"a")

    client.is_gone = True
    world.clock.advance(A_POLL_S)

    assert client.wait() == ["'one' None", CANCELLED]
    assert world.stages.told_to_stop.wait(PATIENCE_S)
    assert "cancel hello on d" in world.stages.log
    assert world.ask("next").wait()[-1] == "'' stop"  # although the decoder still holds the first one's thread
    gate.open()
    settle()
    assert world.stages.leases == []
    assert client.log == ["'one' None", CANCELLED]


def test_a_cancel_while_waiting_touches_no_stage(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1)
    _, gate = world.hold("first")
    waiting = world.ask("waiting", b"a")

    waiting.is_gone = True
    world.clock.advance(A_POLL_S)

    assert waiting.wait() == [CANCELLED]
    gate.open()
    settle()
    assert world.stages.log == ["decode first with [] on d"]


def test_a_cancel_while_encoding_reaches_no_decoder(world: World) -> None:
    gate = world.stages.encode_gates[b"a"] = Gate()
    client = world.ask("hello", b"a")
    gate.wait_reached()

    client.is_gone = True
    world.clock.advance(A_POLL_S)

    assert client.wait() == [CANCELLED]
    gate.open()
    settle()
    assert world.stages.log == ["encode a on e", "release <a>"]


def test_a_decoder_that_missed_the_cancel_is_told_again(world: World) -> None:
    sent = Gate()

    def answer(_job: DecodeJob) -> Iterator[Chunk]:
        sent.pass_through()  # the cancel overtakes the job
        yield chunk("", None)
        yield from (chunk("never read") for _ in range(1000))

    world.stages.answer = answer
    client = world.ask("hello", streaming=False)
    sent.wait_reached()
    client.is_gone = True
    world.clock.advance(A_POLL_S)
    client.wait()
    assert world.stages.told_to_stop.wait(PATIENCE_S)

    sent.open()
    settle()

    assert world.stages.log == ["decode hello with [] on d", "cancel hello on d", "cancel hello on d"]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_deadline_while_decoding_ends_the_request(world: World, streaming: bool) -> None:
    client, gate = world.hold("hello", b"a", deadline_s=2.0, streaming=streaming)

    world.clock.advance(2.0)

    told = "[DEADLINE_EXCEEDED] the deadline of 2000 ms passed while being served"
    assert client.wait() == (["'one' None", told] if streaming else [told])
    assert world.stages.told_to_stop.wait(PATIENCE_S)
    gate.open()


def test_a_deadline_while_waiting_ends_the_request(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1)
    first, gate = world.hold("first")
    waiting = world.ask("waiting", deadline_s=0.25)

    world.clock.advance(0.25)

    assert waiting.wait() == ["[DEADLINE_EXCEEDED] the deadline of 250 ms passed while waiting for a place"]
    gate.open()
    assert first.wait() == ["'one' None", "' two' stop"]
    assert world.stages.log == ["decode first with [] on d"]


def test_before_its_deadline_a_request_goes_on(world: World) -> None:
    client, gate = world.hold("hello", deadline_s=2.0)
    other, other_gate = world.hold("other", deadline_s=1.0)

    world.clock.advance(1.999)

    other.wait()  # the watch has looked
    gate.open()
    other_gate.open()
    assert client.wait() == ["'one' None", "' two' stop"]


class SlowClient(FakeClient):
    """A client whose last reply takes its time."""

    def __init__(self, gate: Gate) -> None:
        super().__init__("slow")
        self._gate = gate

    def reply(self, reply: Reply, is_last: bool) -> None:
        if is_last:
            self._gate.pass_through()
        super().reply(reply, is_last)


def test_a_deadline_that_passes_during_the_last_reply_is_too_late(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1)
    gate = Gate()
    slow = world.ask("slow", deadline_s=1.0, client=SlowClient(gate))
    gate.wait_reached()
    waiting = world.ask("waiting", deadline_s=1.0)

    world.clock.advance(1.0)
    waiting.wait()  # the watch has begun its look, and comes to the slow one next
    gate.open()

    slow.wait()
    settle()
    world.relay.close()  # waits for the watch
    assert slow.log == ["'one' None", "' two' None", "'' stop"]


def test_a_silent_decoder_ends_the_request(start_relay: StartRelay) -> None:
    world = start_relay(stall_s=5.0)
    client, gate = world.hold("hello", b"a")

    world.clock.advance(5.1)

    assert client.wait() == ["'one' None", "[UNAVAILABLE] nothing came for 5 s; retry"]
    assert world.stages.told_to_stop.wait(PATIENCE_S)
    gate.open()


def test_a_silent_encoder_ends_the_request(start_relay: StartRelay) -> None:
    world = start_relay(stall_s=5.0)
    gate = world.stages.encode_gates[b"a"] = Gate()
    client = world.ask("hello", b"a")
    gate.wait_reached()

    world.clock.advance(5.1)

    assert client.wait() == ["[UNAVAILABLE] nothing came for 5 s; retry"]
    gate.open()


def test_waiting_for_a_place_is_not_silence(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1, stall_s=5.0)
    client, gate = world.hold("first")
    held = Gate()

    def answer(_job: DecodeJob) -> Iterator[Chunk]:
        held.pass_through()
        yield chunk("late", "stop")

    world.stages.answers["waiting"] = answer
    waiting = world.ask("waiting")
    world.clock.advance(5.1)
    client.wait()  # ended as silent, so the one that waited has its place now
    held.wait_reached()
    seen = world.ask("seen", deadline_s=0.1)
    world.clock.advance(0.2)
    seen.wait()  # the watch has looked again

    held.open()
    gate.open()

    assert waiting.wait() == ["'late' stop"]


def test_a_client_that_cannot_be_asked_keeps_no_other_from_its_cancel(world: World) -> None:
    broken, gone = FakeClient("broken"), FakeClient("gone")
    broken.breaks_at = "is_cancelled"
    _, broken_gate = world.hold("broken", client=broken)
    _, gone_gate = world.hold("gone", client=gone)

    gone.is_gone = True
    world.clock.advance(A_POLL_S)

    assert gone.wait() == ["'one' None", CANCELLED]
    broken_gate.open()
    gone_gate.open()
