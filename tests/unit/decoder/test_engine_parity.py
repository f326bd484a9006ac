"""The engine gives transformers' greedy tokens, whatever else is in the batch."""

from __future__ import annotations

import random

import pytest

from tests.unit.decoder.conftest import Case, Receiver, StartEngine


def test_one_at_a_time_equals_transformers(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine(prefix_cache=False)

    answers = [harness.submit(case).token_ids() for case in cases]

    assert answers == [case.answer for case in cases]
    assert len(set(answers)) > 12, "the answers should vary"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False},
        {"max_step_tokens": 16, "max_sequences": 8},
        {"block_tokens": 16, "max_step_tokens": 37},
        {"num_blocks": 40},
        {"compile": False},
        {"runs_ahead": True},
        {"runs_ahead": True, "compile": False, "num_blocks": 40},
        {"runs_ahead": True, "block_tokens": 16, "max_sequences": 5},
    ],
    ids=[
        *("default", "no_prefix_cache", "small_chunks", "odd_chunks", "tiny_pool", "torch_operators"),
        *("ahead", "ahead_in_a_tiny_pool", "ahead_with_few_sequences"),
    ],
)
def test_staggered_batch_equals_transformers(
    start_engine: StartEngine, cases: list[Case], options: dict[str, object]
) -> None:
    harness = start_engine(**options)
    order = random.Random(3).sample(range(len(cases)), len(cases))
    receivers: dict[int, Receiver] = {}

    def submit_next(_: object = None) -> None:
        if order:
            index = order.pop()
            receivers[index] = Receiver(on_delta=submit_next if len(order) % 2 else None)
            harness.submit(cases[index], str(index), receivers[index])

    while order:
        submit_next()
        next(iter(receivers.values())).wait()
    answers = {index: receiver.token_ids() for index, receiver in receivers.items()}

    assert answers == {index: case.answer for index, case in enumerate(cases)}


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_cancels_leave_the_neighbours_tokens_alone(
    start_engine: StartEngine, cases: list[Case], runs_ahead: bool
) -> None:
    harness = start_engine(runs_ahead=runs_ahead)
    receivers = [Receiver() for _ in cases]
    for index in (3, 7, 11):
        receivers[index].on_delta = lambda delta, index=index: (
            harness.engine.cancel(str(index)) if not delta.is_final else None
        )

    for index, case in enumerate(cases):
        harness.submit(case, str(index), receivers[index])
    kept = {index: receiver.token_ids() for index, receiver in enumerate(receivers) if index not in (3, 7, 11)}

    assert kept == {index: case.answer for index, case in enumerate(cases) if index not in (3, 7, 11)}
    for index in (3, 7, 11):
        deltas = receivers[index].wait()
        assert deltas[-1].error is not None
        assert deltas[-1].error.code == "CANCELLED"
        assert receivers[index].token_ids() == cases[index].answer[: len(deltas) - 1]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_preemption_in_a_tiny_pool_changes_no_token(
    start_engine: StartEngine, cases: list[Case], runs_ahead: bool
) -> None:
    harness = start_engine(num_blocks=35, prefix_cache=False, runs_ahead=runs_ahead)

    receivers = [harness.submit(case, str(index)) for index, case in enumerate(cases)]
    answers = [receiver.token_ids() for receiver in receivers]

    assert answers == [case.answer for case in cases]
    assert harness.engine.status().num_preemptions > 0
