"""The founding article's rule, as its text has it."""

from __future__ import annotations

import pytest

from scheduler.decision import NoReplica, StagesFull
from scheduler.loads import Load, RequestShape
from scheduler.routing import Router
from tests.unit.decisions.worlds import COSTS, image_shape, loads, plan

TWO = plan(["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"], "PIX", policy="article")
BRIDGED = plan(
    ["cuda:0", "cuda:1"], ["cuda:2"], {("cuda:0", "cuda:2"): "PIX", ("cuda:1", "cuda:2"): "NV12"}, policy="article"
)


def free(**slots: int) -> dict[str, Load]:
    """Encoders with so many free slots."""
    return {name: Load(free_slots=count) for name, count in slots.items()}


@pytest.mark.parametrize(
    ("world", "slots", "encoder", "weight"),
    [
        (TWO, {"e0": 4, "e1": 4}, "e0", 1.0),  # the first on ties
        (TWO, {"e0": 1, "e1": 2}, "e1", 0.5),
        (TWO, {"e0": 0, "e1": 1}, "e1", 0.25),  # full devices are skipped
        (TWO, {"e0": -2, "e1": 1}, "e1", 0.25),
        (BRIDGED, {"e0": 4, "e1": 4}, "e1", 1.5),  # times 1.5 with NVLink to the decoder pool
        (BRIDGED, {"e0": 4, "e1": 3}, "e1", 1.125),
        (BRIDGED, {"e0": 3, "e1": 2}, "e0", 0.75),  # 0.75 both: the first
        (BRIDGED, {"e0": 4, "e1": 2}, "e0", 1.0),
        (BRIDGED, {"e0": 1, "e1": 0}, "e0", 0.25),
    ],
)
def test_the_encoder_has_the_highest_weight(world, slots, encoder, weight) -> None:  # type: ignore[no-untyped-def]
    decision = Router(world, COSTS).decide(image_shape(2), loads(world, **free(**slots)))

    assert decision.encoders == (encoder, encoder)
    assert (decision.stages[0].replica, decision.stages[0].weight) == (encoder, weight)
    assert (decision.policy, decision.reason_kind) == ("article", "article")


def test_free_slots_that_nobody_told_are_the_stores_less_what_is_pending() -> None:
    decision = Router(TWO, COSTS).decide(image_shape(), loads(TWO, e0=Load(pending_images=60)))

    assert (decision.encoder, decision.stages[0].weight) == ("e1", 64 / 4)


@pytest.mark.parametrize(
    ("numa", "encoder_full", "decoder"),
    [
        ({"cuda:0": (0,), "cuda:1": (1,), "cuda:2": (0,), "cuda:3": (1,)}, "e1", "d0"),
        ({"cuda:0": (0,), "cuda:1": (1,), "cuda:2": (0,), "cuda:3": (1,)}, "e0", "d1"),
        ({"cuda:0": (2,), "cuda:1": (2,), "cuda:2": (0,), "cuda:3": (1,)}, "e0", "d0"),  # no decoder near: the first
        ({}, "e0", "d0"),  # one node
    ],
)
def test_the_decoder_is_the_first_on_the_encoders_node_else_the_first(numa, encoder_full, decoder) -> None:  # type: ignore[no-untyped-def]
    world = plan(["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"], "PIX", numa, policy="article")

    decision = Router(world, COSTS).decide(image_shape(), loads(world, **free(**{encoder_full: 0})))

    assert decision.decoder == decoder


def test_text_goes_to_the_first_decoder_that_is_available() -> None:
    decision = Router(TWO, COSTS).decide(RequestShape(0, 10), loads(TWO, d0=Load(is_available=False)))

    assert (decision.encoder, decision.decoder, decision.mode) == (None, "d1", "text")


def test_no_decoder_is_the_articles_error() -> None:
    gone = Load(is_available=False)

    with pytest.raises(NoReplica, match=r"^no decoder device available$"):
        Router(TWO, COSTS).decide(image_shape(), loads(TWO, d0=gone, d1=gone))


def test_no_encoder_is_an_error_and_a_full_one_an_overload() -> None:
    gone = Load(is_available=False)

    with pytest.raises(NoReplica, match=r"^no encoder device available$"):
        Router(TWO, COSTS).decide(image_shape(), loads(TWO, e0=gone, e1=gone))
    with pytest.raises(StagesFull, match=r"^no encoder device available: all 2 are full$"):
        Router(TWO, COSTS).decide(image_shape(), loads(TWO, **free(e0=0, e1=0)))
