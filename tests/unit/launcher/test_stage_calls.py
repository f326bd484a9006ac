"""How the time of a decode step follows from what decoders tell of their answers."""

from __future__ import annotations

import socket

import pytest

from launcher.process import ServerFailed
from launcher.stage_calls import Marks, NoOverlap, StageCalls, _marks, _step_s


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


def test_a_server_that_is_not_there_is_said_so() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        calls = StageCalls(f"127.0.0.1:{nobody.getsockname()[1]}")

        with pytest.raises(ServerFailed, match=r"clip_encoder: .*onnection refused"):
            calls.encode("clip_encoder", [b"a picture"])

        calls.close()
