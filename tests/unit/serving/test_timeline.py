"""The stations of a request, as spans."""

from __future__ import annotations

import pytest

from python_backend.timeline import Timeline

TIMES = {"landed_s": 2.0, "started_s": 3.0, "first_token_s": 5.0}


def spans(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [(span.name, span.began_s, span.ended_s) for span in timeline.spans]


def test_an_answers_spans_follow_each_other_without_gaps() -> None:
    timeline = Timeline(0.0)
    timeline.add_decoding("llava_decoder", 1.0, 9.0, TIMES)

    assert spans(timeline) == [
        ("transfer", 1.0, 2.0),
        ("wait", 2.0, 3.0),
        ("prefill", 3.0, 5.0),
        ("decode", 5.0, 9.0),
    ]
    assert {span.attributes["decoder"] for span in timeline.spans} == {"llava_decoder"}


@pytest.mark.parametrize(
    ("keys", "names"),
    [((), ["lost"]), (("landed_s",), ["transfer", "lost"]), (("landed_s", "started_s"), ["transfer", "wait", "lost"])],
)
def test_what_a_decoder_did_not_get_to_is_lost_time(keys: tuple[str, ...], names: list[str]) -> None:
    timeline = Timeline(0.0)
    timeline.add_decoding("llava_decoder", 1.0, 9.0, {key: TIMES[key] for key in keys})

    assert [name for name, *_ in spans(timeline)] == names
    assert timeline.spans[-1].ended_s == 9.0
