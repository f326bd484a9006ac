"""When a stage dies its requests go on elsewhere, from the tokens that were given, each ended once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from python_backend.generate import Returns
from python_backend.stream import Chunk, DecodeJob
from tests.unit.serving.conftest import StartRelay, settle
from tests.unit.serving.fakes import Gate, World, chunk

DECODERS = ("d0", "d1")


@pytest.fixture
def pools(start_relay: StartRelay) -> World:
    """Two encoders and two decoders."""
    return start_relay(encoders=("e0", "e1"), decoders=DECODERS)


def dies_after(texts: list[str], death: Gate) -> object:
    """An answer whose first attempt gives these texts and hangs; a later one goes on where it is told to."""

    def answer(job: DecodeJob) -> Iterator[Chunk]:
        if not job.generated_ids and job.request_id.endswith(".1"):
            yield from (chunk(text) for text in texts)
            death.pass_through()
            yield chunk("the dead do not speak", "stop")
            return
        said = bytes(job.generated_ids).decode()
        yield chunk(" two three".removeprefix(said.removeprefix("one")), "stop")

    return answer


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stream_goes_on_at_another_decoder_from_its_tokens(pools: World, streaming: bool) -> None:
    death = Gate()
    pools.stages.answer = dies_after(["one", " two"], death)  # type: ignore[assignment]
    client = pools.ask("hello", b"a", streaming=streaming)
    death.wait_reached()

    pools.relay.replica_died("d0")

    told = client.wait()
    assert "".join(reply.chunk.text for reply in client.replies) == "one two three"
    assert told[-1].endswith("stop")
    assert [bytes(job.generated_ids) for job in pools.stages.jobs] == [b"", b"one two"]
    assert "decode hello with [<a>] on d1" in pools.stages.log
    death.open()
    settle()
    assert "".join(reply.chunk.text for reply in client.replies) == "one two three"
    assert pools.meter.counters["vlm_relay_retries_total"] == 1


def test_the_log_probabilities_go_on_as_well(pools: World) -> None:
    death = Gate()

    def answer(job: DecodeJob) -> Iterator[Chunk]:
        if job.generated_ids:
            yield Chunk((2,), "b", "stop", cumulative_logprob=-0.25)
            return
        yield Chunk((1,), "a", None, cumulative_logprob=-1.0)
        death.pass_through()

    pools.stages.answer = answer
    client = pools.ask("hello")
    death.wait_reached()
    pools.relay.replica_died("d0")
    client.wait()
    assert [reply.chunk.cumulative_logprob for reply in client.replies] == [-1.0, -1.25]
    death.open()


def test_an_encode_that_hangs_in_a_dead_encoder_is_done_by_another(pools: World) -> None:
    gate = Gate()
    pools.stages.encode_gates[b"a"] = gate
    client = pools.ask("hello", b"a")
    gate.wait_reached()
    del pools.stages.encode_gates[b"a"]

    pools.relay.replica_died("e0")

    assert client.wait()[-1] == "'' stop"
    assert [line for line in pools.stages.log if line.startswith("encode")] == ["encode a on e0", "encode a on e1"]
    gate.open()
    settle()


def test_where_a_request_goes_on_is_told_again(pools: World) -> None:
    gate = Gate()
    pools.stages.encode_gates[b"a"] = gate
    client = pools.ask("hello", b"a", returns=Returns(progress=True, decision=True))
    gate.wait_reached()
    del pools.stages.encode_gates[b"a"]

    pools.relay.replica_died("e0")

    assert client.wait()[:3] == ["placed", "placed", "encoded"]
    assert [decision.encoders for decision in client.decisions if decision] == [("e0",), ("e1",)]
    gate.open()
    settle()


def test_a_dead_replica_gets_no_work_until_it_is_back(pools: World) -> None:
    pools.relay.replica_died("d0")
    pools.ask("first").wait()
    settle()
    assert pools.stages.log == ["decode first with [] on d1"]

    pools.relay.replica_returned("d0")
    pools.ask("second").wait()
    settle()
    assert pools.stages.log[-1] == "decode second with [] on d0"


def test_with_no_replica_left_the_error_says_when_to_come_back(pools: World) -> None:
    death = Gate()
    pools.stages.answer = dies_after(["one"], death)  # type: ignore[assignment]
    client = pools.ask("hello")
    death.wait_reached()
    pools.relay.replica_died("d1")

    pools.relay.replica_died("d0")

    assert client.wait() == [
        "'one' None",
        "[UNAVAILABLE] no decoder is available just now: it died and is being restarted; retry after 5 s",
    ]
    death.open()


def test_who_does_not_wait_for_the_dead_is_left_alone(pools: World) -> None:
    other, gate = pools.hold("other", b"a")  # encoded by e0 already, decoding on d0
    pools.relay.replica_died("e0")
    pools.relay.replica_died("d1")
    gate.open()
    assert other.wait() == ["'one' None", "' two' stop"]
    assert "vlm_relay_retries_total" not in pools.meter.counters


def test_a_request_that_samples_keeps_its_seed_at_another_decoder(pools: World) -> None:
    from dataclasses import replace

    from python_backend.generate import GenerateRequest, Returns
    from python_backend.request import SamplingParameters
    from tests.unit.serving.fakes import FakeClient

    death = Gate()
    pools.stages.answer = dies_after(["one"], death)  # type: ignore[assignment]
    request = GenerateRequest("hello", None, (), SamplingParameters(temperature=1.0), True, None, Returns(), 0, None)
    client = FakeClient("hello")
    pools.clients.append(client)
    pools.relay.accept(replace(request), client)
    death.wait_reached()
    pools.relay.replica_died("d0")
    client.wait()
    first, second = (job.sampling.seed for job in pools.stages.jobs)
    assert first is not None
    assert first == second
    death.open()


def test_an_image_goes_to_the_encoder_that_has_it(pools: World) -> None:
    gate = Gate()
    pools.stages.encode_gates[b"b"] = gate
    busy = pools.ask("busy", b"b")  # the first encoder is at work
    gate.wait_reached()
    pools.ask("first", b"a").wait()
    gate.open()
    busy.wait()
    settle()
    pools.ask("again", b"a").wait()
    pools.ask("other", b"c").wait()
    settle()
    encodes = [line for line in pools.stages.log if line.startswith("encode")]
    assert encodes == ["encode b on e0", "encode a on e1", "encode a on e1", "encode c on e0"]


def test_a_restarted_encoder_is_not_taken_to_have_its_images(pools: World) -> None:
    pools.relay.replica_died("e0")
    pools.ask("first", b"a").wait()
    pools.relay.replica_returned("e0")
    pools.relay.replica_died("e1")
    pools.relay.replica_returned("e1")
    settle()
    pools.ask("again", b"a").wait()
    settle()
    assert [line for line in pools.stages.log if line.startswith("encode")] == ["encode a on e1", "encode a on e0"]
