"""One attempt by itself: what it says, what it holds, and when it says nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from python_backend.attempts import Attempts
from python_backend.encoding import Encoding
from python_backend.generate import GenerateRequest, Returns
from python_backend.house import House
from python_backend.placing import Placing
from python_backend.request import SamplingParameters
from python_backend.stream import Attempt, Chunk, DecodeJob, Encoded, Gathered, Stream
from python_backend.timeline import Timeline
from tests.unit.serving.conftest import loads
from tests.unit.serving.fakes import CharacterPrompts, Clock, FakeClient, FakeMeter, FakeStages, chunk, limits, router


class Bench:
    """Attempts at requests that no relay watches over, run on the test's thread."""

    def __init__(self) -> None:
        self.stages, self.clock = FakeStages(), Clock()
        self.placing = Placing(router(("e",), ("d",)), self.clock)
        self.encoding = Encoding(self.stages, gate_width=4)
        self.house = House(self.placing, limits())
        prompts, meter = CharacterPrompts(), FakeMeter()
        self.attempts = Attempts(
            self.stages,
            prompts,  # type: ignore[arg-type]
            self.placing,
            self.house,
            self.encoding,
            meter,
            self.clock,
            warn_ms=1e9,
        )

    def served(self, *images: bytes) -> tuple[Stream, FakeClient]:
        """A request that has a place to be served in."""
        client, now_s = FakeClient(), self.clock()
        request = GenerateRequest("hello", None, images, SamplingParameters(), True, None, Returns(), 0, None)
        stream = Stream("1", request, client, now_s, 0.0, None, now_s, Attempt(1), Gathered(True), Timeline(now_s))
        assert self.house.enter(stream, now_s) is None
        assert self.house.serve_next(now_s) is stream
        return stream, client


@pytest.fixture
def bench() -> Iterator[Bench]:
    """At the end every lease and every place was given back."""
    bench = Bench()
    yield bench
    bench.encoding.close()
    assert bench.stages.leases == []
    assert loads(bench.placing) == router(("e",), ("d",)).idle()


def test_it_gives_the_last_word_and_holds_a_lease_until_it_is_given_back(bench: Bench) -> None:
    stream, client = bench.served(b"a")

    assert bench.attempts.run(stream, stream.attempt)

    assert client.log == ["'one' None", "' two' None", "'' stop"]
    assert bench.stages.leases == [b"<a>"]
    bench.attempts.give_back(stream, stream.attempt)
    assert bench.stages.log[-1] == "release <a>"


def test_one_that_was_replaced_says_nothing_more_and_stops_its_decoder(bench: Bench) -> None:
    stream, client = bench.served()
    first = stream.attempt

    def answer(_job: DecodeJob) -> Iterator[Chunk]:
        yield chunk("one")
        stream.attempt = Attempt(2)
        yield chunk(" two")

    bench.stages.answer = answer

    assert not bench.attempts.run(stream, first)

    assert client.log == ["'one' None"]
    assert bench.stages.log[-1] == "cancel hello on d"
    bench.attempts.give_back(stream, first)


def test_one_that_was_replaced_before_it_decodes_asks_no_decoder(bench: Bench) -> None:
    stream, client = bench.served(b"a")
    first, stream.attempt = stream.attempt, Attempt(2)

    assert not bench.attempts.run(stream, first)

    assert (client.log, bench.stages.log) == ([], ["encode a on e"])
    bench.attempts.give_back(stream, first)


def test_a_lease_that_comes_after_all_was_given_back_is_given_back_too(bench: Bench) -> None:
    stream, _ = bench.served()
    bench.attempts.give_back(stream, stream.attempt)

    late = bench.stages.encode("e", b"late")
    bench.house.keep(stream.attempt, Encoded(late.handle))
    bench.attempts.give_back(stream, stream.attempt)

    assert bench.stages.log[-1] == "release <late>"


def test_a_decoder_that_is_down_is_not_told_to_stop(bench: Bench) -> None:
    bench.placing.died("d")

    bench.attempts.stop("d", "1.1")

    assert bench.stages.log == []
