"""Every request ends once, with the right words, and no request harms another."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from python_backend.decoder.batch import Chunk
from python_backend.decoder.engine import DecodeRequest, Delta, Engine, EngineOptions, ImageEmbedding
from python_backend.decoder.runner import Outcome
from python_backend.errors import (
    DeadlineExceeded,
    InvalidPrompt,
    InvalidRequest,
    Overloaded,
    PeerGone,
    RelayError,
)
from python_backend.request import SamplingParameters
from tests.unit.decoder.conftest import (
    BOS,
    EOS,
    IMAGE,
    IMAGE_TOKENS,
    VOCABULARY,
    WIDTH,
    Case,
    FakeClock,
    Halting,
    Receiver,
    StartEngine,
    byte_tokenizer,
    features,
)

LONG = 200  # tokens; far more than a test waits for


def error_of(receiver: Receiver) -> RelayError:
    error = receiver.wait()[-1].error
    assert error is not None
    return error


def fail_when(harness_engine: Engine, token_id: int, outcome: Exception | None) -> None:
    """Make the model fail for sequences that begin with a token: raise, or fill their features with NaN."""
    runner = harness_engine._runner
    run, embed = runner.run, runner._model.embed

    def failing_run(chunks: list[Chunk]) -> list[Outcome]:
        if any(chunk.sequence.token_ids[0] == token_id for chunk in chunks):
            assert outcome is not None
            raise outcome
        return run(chunks)

    def failing_embed(token_ids: torch.Tensor) -> torch.Tensor:
        rows = embed(token_ids)
        rows[token_ids == token_id] = math.nan
        return rows

    if outcome is None:
        runner._model.embed = failing_embed  # type: ignore[method-assign]
    else:
        runner.run = failing_run  # type: ignore[method-assign]


def test_a_cancel_ends_a_running_and_a_waiting_request(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine(max_sequences=1)
    running = Halting()
    harness.submit(cases[0], "running", running, max_tokens=LONG, ignore_eos=True)
    waiting = harness.submit(cases[1], "waiting")
    running.halt()

    answers = [harness.engine.cancel(request_id) for request_id in ("waiting", "running", "unknown")]
    running.go_on()

    assert [error_of(receiver).code for receiver in (running, waiting)] == ["CANCELLED"] * 2
    assert answers == [True, True, False]
    assert harness.engine.cancel("running") is False


def test_a_deadline_ends_a_request_in_any_state(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine(max_sequences=1)

    def pass_time(_: Delta) -> None:
        harness.clock.now_s += 1.0

    receivers = [Receiver(on_delta=pass_time), Receiver()]
    for index, receiver in enumerate(receivers):
        sampling = SamplingParameters(max_tokens=LONG, ignore_eos=True)
        request = DecodeRequest(str(index), cases[0].token_ids, (), sampling, deadline_s=3.0)
        harness.engine.submit(request, receiver)

    assert [error_of(receiver).code for receiver in receivers] == ["DEADLINE_EXCEEDED"] * 2
    assert [len(receiver.deltas) for receiver in receivers] == [4, 1]
    with pytest.raises(DeadlineExceeded):
        harness.engine.submit(DecodeRequest("late", (BOS,), (), SamplingParameters(), deadline_s=3.0), Receiver())


@pytest.mark.parametrize(
    ("token_ids", "images", "message"),
    [
        ((), (), "empty"),
        ((BOS, IMAGE), (), "1 image tokens but 0 images"),
        ((BOS,), (ImageEmbedding(b"a", features(4)),), "0 image tokens but 1 images"),
        ((BOS, VOCABULARY), (), f"token id {VOCABULARY} is outside"),
        ((BOS, -1), (), "token id -1 is outside"),
        ((BOS,) * 256, (), "256 tokens; the context of 256"),
        ((IMAGE,), (ImageEmbedding(b"a", features(300)),), "300 tokens; the context of 256"),
        ((IMAGE,), (ImageEmbedding(b"a", features(4, WIDTH + 1)),), r"image 0 are \(4, 65\)"),
        ((IMAGE,), (ImageEmbedding(b"a", features(0)),), "the prompt is empty"),
        ((IMAGE,), (ImageEmbedding(b"a", features(4, value=math.nan)),), "image 0 are not finite"),
    ],
)
def test_a_prompt_that_cannot_be_computed_is_refused(
    start_engine: StartEngine, token_ids: tuple[int, ...], images: tuple[ImageEmbedding, ...], message: str
) -> None:
    harness = start_engine()

    with pytest.raises(InvalidPrompt, match=message):
        harness.engine.submit(DecodeRequest("r", token_ids, images, SamplingParameters()), Receiver())


def test_too_many_waiting_requests_are_refused_at_once(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine(max_sequences=1, max_waiting=2)
    running = Halting()
    harness.submit(cases[0], "running", running, max_tokens=LONG, ignore_eos=True)
    running.halt()
    harness.submit(cases[0], "1")
    harness.submit(cases[0], "2")

    with pytest.raises(Overloaded, match="3 requests run on the decoder or wait, 3 may"):
        harness.submit(cases[0], "3")
    with pytest.raises(InvalidRequest, match="'1' is in use"):
        harness.submit(cases[0], "1")
    running.go_on()


def test_a_receiver_that_raises_ends_its_request_only(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()

    def raise_once(delta: Delta) -> None:
        if not delta.is_final:
            raise RuntimeError("the receiver is broken")

    with harness.together:
        broken = harness.submit(cases[1], "broken", Receiver(on_delta=raise_once))
        well = harness.submit(cases[2], "well")

    assert error_of(broken).code == "INTERNAL"
    assert len(broken.deltas) == 2
    assert well.token_ids() == cases[2].answer


def test_a_receiver_that_raises_at_the_end_changes_nothing(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()

    def always_raise(delta: Delta) -> None:
        raise RuntimeError("the receiver is broken")

    broken = harness.submit(cases[1], "broken", Receiver(on_delta=always_raise))

    assert error_of(broken).code == "INTERNAL"
    assert harness.submit(cases[2], "well").token_ids() == cases[2].answer


@pytest.mark.parametrize("failure", [None, RuntimeError("no memory")], ids=["nan", "raises"])
def test_a_request_that_breaks_the_model_ends_alone(
    start_engine: StartEngine, cases: list[Case], failure: Exception | None
) -> None:
    harness = start_engine(num_blocks=64, block_tokens=16)
    used = {token_id for case in cases for token_id in (*case.token_ids, *case.answer)}
    bad = next(token_id for token_id in range(VOCABULARY) if token_id not in used)
    fail_when(harness.engine, bad, failure)
    poisoned = Case((bad, *cases[0].token_ids), cases[0].images, ())

    with harness.together:
        receivers = [harness.submit(case, str(index)) for index, case in enumerate([cases[3], poisoned, cases[4]])]
    answers = [receivers[0].token_ids(), receivers[2].token_ids()]
    error = error_of(receivers[1])
    later = [harness.submit(case, "later").token_ids() for case in cases]  # reuse the blocks

    assert answers == [cases[3].answer, cases[4].answer]
    assert error.code == "INTERNAL"
    assert later == [case.answer for case in cases]


def test_a_request_whose_text_cannot_be_made_ends_alone(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()
    broken = Receiver()

    def break_text(_: Delta) -> None:
        (sequence,) = (each for each in harness.engine._chooser.running if each.emit is broken)
        sequence.text = None  # type: ignore[assignment]

    broken.on_delta = lambda delta: None if delta.is_final else break_text(delta)
    with harness.together:
        harness.submit(cases[1], "broken", broken)
        well = harness.submit(cases[2], "well")

    assert error_of(broken).code == "INTERNAL"
    assert well.token_ids() == cases[2].answer


def test_blocks_of_a_broken_request_are_not_shared(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine(max_step_tokens=32)
    case = cases[12]  # 53 tokens: its first chunk is shared before its logits are known
    embed = harness.engine._runner._model.embed
    fail_when(harness.engine, case.token_ids[3], None)
    broken = harness.submit(case, "broken")
    assert error_of(broken).code == "INTERNAL"
    harness.engine._runner._model.embed = embed  # type: ignore[method-assign]

    receiver = harness.submit(case, "again")

    assert receiver.token_ids() == case.answer
    assert receiver.deltas[-1].num_cached_tokens == 0


def test_a_cancel_during_a_step_keeps_its_token_back(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()
    other, receiver = Receiver(), Receiver()

    def act(_: Delta) -> None:
        if len(receiver.deltas) == 1:  # from the next step on both are in every step
            harness.submit(cases[2], "other", other)
        if len(receiver.deltas) == 3:
            harness.engine.cancel("other")

    receiver.on_delta = act
    harness.submit(cases[1], "r", receiver)

    assert [len(delta.token_ids) for delta in other.wait()] == [1, 0]
    assert receiver.token_ids() == cases[1].answer


def test_close_ends_every_request(checkpoint: Path, cases: list[Case]) -> None:
    engine = Engine.load(checkpoint, EngineOptions(num_blocks=64, max_sequences=2), FakeClock())
    running = Halting()
    receivers = [running, Receiver(), Receiver(), Receiver()]
    sampling = SamplingParameters(max_tokens=LONG, ignore_eos=True)
    engine.start()
    for index, receiver in enumerate(receivers):
        engine.submit(DecodeRequest(str(index), cases[0].token_ids, (), sampling), receiver)
    running.halt()

    engine._inbox.close()  # as `close` does before it waits for the engine
    running.go_on()
    engine.close()

    assert [error_of(receiver).code for receiver in receivers] == ["UNAVAILABLE"] * 4
    assert engine.status().free_blocks == 64
    with pytest.raises(PeerGone):
        engine.submit(DecodeRequest("late", (BOS,), (), sampling), Receiver())


def test_closing_an_engine_that_never_started_ends_its_requests(checkpoint: Path) -> None:
    engine = Engine.load(checkpoint, EngineOptions(num_blocks=64), FakeClock())
    receiver = Receiver()
    engine.submit(DecodeRequest("r", (BOS,), (), SamplingParameters()), receiver)

    engine.close()

    assert error_of(receiver).code == "UNAVAILABLE"


def test_max_tokens_and_the_context_end_with_length(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine(context_tokens=40)
    case = cases[3]  # 18 tokens

    short = harness.submit(case, "short", max_tokens=3, ignore_eos=True)
    long = harness.submit(case, "long", max_tokens=LONG, ignore_eos=True)

    assert (len(short.token_ids()), short.deltas[-1].finish_reason) == (3, "length")
    assert (len(long.token_ids()), long.deltas[-1].finish_reason) == (40 - len(case.token_ids), "length")


def test_an_end_token_ends_with_stop_and_shows_no_text(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()
    case = cases[0]
    stop = case.answer[4]
    length = case.answer.index(stop) + 1

    receiver = harness.submit(case, stop_token_ids=(stop,), skip_special_tokens=False)
    shown = harness.submit(case, "shown", stop_token_ids=(stop,), include_stop_str_in_output=True)

    assert receiver.token_ids() == case.answer[:length]
    assert receiver.deltas[-1].finish_reason == "stop"
    assert receiver.text() == byte_tokenizer().decode(case.answer[: length - 1])
    assert shown.text() == byte_tokenizer().decode(case.answer[:length])


def test_a_stop_string_ends_with_stop(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()
    case = cases[2]
    text = byte_tokenizer().decode(case.answer)
    stop = text[5:7]

    receiver = harness.submit(case, stop=(stop,))

    assert receiver.text() == text[: text.index(stop)]
    assert receiver.deltas[-1].finish_reason == "stop"


def test_ignore_eos_goes_on(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()
    engine_eos = harness.engine._runner.config.eos_ids

    receiver = harness.submit(cases[5], max_tokens=60, ignore_eos=True)

    assert engine_eos == {EOS}
    assert len(receiver.token_ids()) == 60


def test_counts_come_with_every_delta(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()
    case = cases[5]  # two images
    num_tokens = len(case.token_ids) + 2 * (IMAGE_TOKENS - 1)

    first = harness.submit(case, "first", logprobs=2).wait()
    second = harness.submit(case, "second").wait()

    assert {delta.num_prompt_tokens for delta in first} == {num_tokens}
    assert {delta.num_cached_tokens for delta in first} == {0}
    assert {delta.num_cached_tokens for delta in second} == {(num_tokens - 1) // 4 * 4}
    total = sum(each.logprob for delta in first for each in delta.logprobs)
    assert first[-1].cumulative_logprob == pytest.approx(total, abs=1e-5)
    assert [len(delta.logprobs) for delta in first] == [1] * len(first)
    assert all(delta.logprobs[0].rank == 1 and len(delta.logprobs[0].top) == 2 for delta in first)
    assert not any(delta.logprobs for delta in second)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.2, "seed": 9, "top_p": 0.9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"stop": ("\ufffdZ", "qq")},
    ],
    ids=["greedy", "seeded", "penalties", "stop"],
)
@pytest.mark.parametrize("num_before", [1, 7, 23])
def test_a_resumed_request_goes_on_as_if_never_interrupted(
    start_engine: StartEngine, cases: list[Case], sampling: dict[str, object], num_before: int
) -> None:
    harness = start_engine()
    case = cases[4]
    whole = harness.submit(case, "whole", ignore_eos=True, **sampling)
    before = whole.token_ids()[:num_before]

    receiver = Receiver()
    parameters = SamplingParameters(max_tokens=24, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    harness.engine.submit(DecodeRequest("rest", case.token_ids, case.images, parameters, None, before), receiver)

    assert receiver.token_ids() == whole.token_ids()[num_before:]
    assert receiver.text() == "".join(delta.text for delta in whole.deltas[num_before:])


def test_a_resumed_request_that_was_complete_ends_at_once(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()
    receiver = Receiver()
    request = DecodeRequest("r", cases[0].token_ids, (), SamplingParameters(max_tokens=3), None, (9, 9, 9))

    harness.engine.submit(request, receiver)

    (delta,) = receiver.wait()
    assert (delta.finish_reason, delta.token_ids, delta.text) == ("length", (), "")


def test_seeded_sampling_is_the_same_in_any_batch(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine()
    sampling = {"temperature": 1.0, "top_p": 0.9}

    alone = [harness.submit(case, "r", seed=index, **sampling).token_ids() for index, case in enumerate(cases)]
    with harness.together:
        receivers = [harness.submit(case, str(index), seed=index, **sampling) for index, case in enumerate(cases)]

    assert [receiver.token_ids() for receiver in receivers] == alone
    assert alone != [case.answer for case in cases]
