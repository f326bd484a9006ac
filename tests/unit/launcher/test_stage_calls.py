"""How the time of a decode step follows from what decoders tell of their answers."""

from __future__ import annotations

import pytest

from launcher.stage_calls import Marks, NoOverlap, _marks, _step_s


def test_a_step_is_timed_by_the_engines_count_while_all_answers_are_generated() -> None:
    answers = [Marks(1.0, 10, 3.0, 40), Marks(1.5, 20, 4.0, 60)]  # together from step 20 to step 40

    assert _step_s(answers) == pytest.approx((3.0 - 1.5) / 20)


def test_answers_that_hardly_overlap_are_no_measurement() -> None:
    with pytest.raises(NoOverlap, match="overlap in 5 steps"):
        _step_s([Marks(1.0, 10, 2.0, 30), Marks(1.8, 25, 3.0, 50)])


def test_an_engine_that_counts_no_steps_gives_no_marks() -> None:
    whole = {"first_token_s": 1.0, "first_step": 3, "last_token_s": 2.0, "last_step": 7, "accepted_s": 0.5}

    assert _marks(whole) == [Marks(1.0, 3, 2.0, 7)]
    assert _marks({"first_token_s": 1.0, "last_token_s": 2.0}) == []
