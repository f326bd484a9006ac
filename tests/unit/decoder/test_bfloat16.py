"""In bfloat16 a step gives the logits of the same model run alone, within the format's own steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_backend.decoder.native import load_library
from python_backend.decoder.sequence import TokenLogprob
from tests.unit.decoder.conftest import Case, Receiver, StartEngine

# A value of bfloat16 has eight bits, so one rounding is up to 2 ** -9 of it; logits here are up to about 12, and
# the roundings of two layers in another order move a log-probability by up to 0.12.
TOLERANCE = 0.15
NUM_TOP = 5


def tops(receiver: Receiver) -> list[TokenLogprob]:
    return [each for delta in receiver.wait() for each in delta.logprobs]


def assert_close(found: list[TokenLogprob], expected: list[TokenLogprob]) -> int:
    """Compare until the answers part, which only a near tie may cause; how many tokens were compared."""
    for count, (one, other) in enumerate(zip(found, expected, strict=False)):
        theirs = {each.token_id: each.logprob for each in other.top}
        for each in one.top:
            if each.token_id in theirs:
                assert each.logprob == pytest.approx(theirs[each.token_id], abs=TOLERANCE)
        if one.token_id != other.token_id:
            assert abs(one.logprob - theirs[one.token_id]) < TOLERANCE
            assert abs(other.top[0].logprob - other.top[1].logprob) < 2 * TOLERANCE
            return count
    return min(len(found), len(expected))


@pytest.mark.skipif(load_library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_compiled_a_batch_gives_the_very_logits_of_each_request_alone(
    start_engine: StartEngine, cases: list[Case], weights: str
) -> None:
    harness = start_engine(dtype="bfloat16", weights=weights, prefix_cache=False, max_step_tokens=2000, num_blocks=1024)

    alone = [tops(harness.submit(case, "r", logprobs=NUM_TOP)) for case in cases]
    receivers = [harness.submit(case, str(index), logprobs=NUM_TOP) for index, case in enumerate(cases)]

    assert [tops(receiver) for receiver in receivers] == alone


@pytest.mark.parametrize("compile_operators", [True, False])
def test_a_batch_gives_the_logits_of_each_request_alone(
    start_engine: StartEngine, checkpoint: Path, cases: list[Case], compile_operators: bool
) -> None:
    harness = start_engine(dtype="bfloat16", compile=compile_operators, prefix_cache=False, max_step_tokens=100)

    alone = [tops(harness.submit(case, "r", logprobs=NUM_TOP)) for case in cases]
    receivers = [harness.submit(case, str(index), logprobs=NUM_TOP) for index, case in enumerate(cases)]
    together = [tops(receiver) for receiver in receivers]

    compared = [assert_close(found, expected) for found, expected in zip(together, alone, strict=True)]
    assert sum(compared) > 8 * len(cases), "the answers part too soon to compare much"
