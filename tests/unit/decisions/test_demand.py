"""What encodes and decodes on one device take from each other, and how that moves decisions."""

from __future__ import annotations

from math import exp

import pytest

from scheduler.board import Board
from scheduler.cost import ContentionCost
from scheduler.demand import COUNTED_SHARE, FIRST_S, LEAST_SHARE, MEMORY_S, STEP_S, Demand
from scheduler.ledger import Ledger
from scheduler.loads import Load, RequestShape
from scheduler.pools import Pools, costs_of
from scheduler.pricing import Pricing
from scheduler.routing import Router
from tests.unit.decisions.worlds import COSTS, image_shape, loads, plan

HEAVY = COSTS.model_copy(update={"encode": COSTS.encode.model_copy(update={"image_s": 0.1})})
ONE_OF_TWO = plan(["cuda:0"], ["cuda:0", "cuda:1"], "NV12")
"""d0 has the encoder on its device, d1 has none."""


def demand_of(share: float, contention: ContentionCost | None = None) -> Demand:
    """Of a device that was asked to encode that share of the time, for long."""
    costs = COSTS.model_copy(update={"contention": contention or ContentionCost()})
    demand = Demand(Pools(ONE_OF_TWO, costs_of(ONE_OF_TWO, costs)))
    for step in range(4000):
        demand.look(step * 0.1)
        demand.send(0, share * 0.1)
    demand.look(400.05)
    return demand


@pytest.mark.parametrize("share", [0.1, 0.3, 0.45])
def test_stages_that_take_turns_lose_what_the_other_takes(share: float) -> None:
    demand = demand_of(share)

    # At half the speed each, encodes take twice as long, and half of that is lost to the decodes.
    assert demand.stretch[0] == pytest.approx(1 / (1 - COUNTED_SHARE * share), rel=0.01)
    beside = 2 * (1 + share / (1 - 2 * share))
    alone = 1 + share / 2 / (1 - share)
    assert demand.delay[0] == pytest.approx(share * (beside - alone), rel=0.06)
    assert (demand.stretch[1], demand.delay[1]) == (1.0, 0.0)


def test_stages_that_do_not_disturb_each_other_cost_nothing() -> None:
    demand = demand_of(0.6, ContentionCost(encode_speed=1.0, decode_speed=1.0))

    assert (demand.stretch[0], demand.delay[0]) == (1.0, 0.0)


def test_more_to_encode_costs_more_and_never_without_end() -> None:
    found = [demand_of(share) for share in (0.0, 0.05, 0.2, 0.5, 0.9, 5.0)]

    delays = [each.delay[0] for each in found]
    assert delays == sorted(delays)
    assert 0 < delays[0] < 0.02
    assert delays[-1] < 5000
    assert found[-1].stretch[0] == 1 / (1 - COUNTED_SHARE / 2)


def test_what_was_sent_long_ago_is_forgotten() -> None:
    demand = Demand(Pools(ONE_OF_TWO, costs_of(ONE_OF_TWO, COSTS)))
    demand.look(0.0)
    demand.send(0, 0.2)
    demand.look(STEP_S)
    at_once = demand.stretch[0]
    demand.look(MEMORY_S)

    memory_s = MEMORY_S * (1 - exp(-FIRST_S / MEMORY_S))
    assert at_once == pytest.approx(1 / (1 - COUNTED_SHARE * 0.2 / memory_s), rel=0.01)
    assert demand.stretch[0] == pytest.approx(1 / (1 - COUNTED_SHARE * LEAST_SHARE))


def test_an_idle_server_decodes_beside_no_encoder() -> None:
    router = Router(ONE_OF_TWO, COSTS)

    assert router.decide(RequestShape(0, 64, 128), loads(ONE_OF_TWO), 0.0).decoder == "d1"


def test_decodes_leave_a_device_that_encodes_much() -> None:
    """d1 grows ever fuller, and still nothing decodes beside an encoder that is asked for 0.8 of its time."""
    router = Router(ONE_OF_TWO, HEAVY)
    ledger, places = Ledger(router.idle()), []
    for number in range(160):
        place = ledger.take(router.decide(image_shape(), ledger.loads, number / 8), image_shape())
        ledger.note_encoded(place)
        places.append(place)
        if number >= 30:
            ledger.give_back(places[number - 30])

    assert {place.decision.decoder for place in places} == {"d1"}


def test_a_light_encoder_keeps_no_decode_away() -> None:
    router = Router(ONE_OF_TWO, COSTS)
    for number in range(100):
        router.decide(image_shape(), loads(ONE_OF_TWO), number / 8)

    decision = router.decide(image_shape(), loads(ONE_OF_TWO, d1=Load(running=8, pending_tokens=6000)), 13.0)

    assert decision.decoder == "d0"


def test_predictions_know_that_the_device_is_shared() -> None:
    router = Router(ONE_OF_TWO, HEAVY)
    busy = loads(ONE_OF_TWO, d1=Load(is_available=False))
    first = router.decide(image_shape(), busy, 0.0)
    for number in range(1, 100):
        last = router.decide(image_shape(), busy, number / 4)

    assert last.step_s == pytest.approx(first.step_s / (1 - COUNTED_SHARE * 0.4), rel=0.05)
    assert last.prefill_s == pytest.approx(first.prefill_s / (1 - COUNTED_SHARE * 0.4), rel=0.05)
    assert last.finish_s < 10  # the price of the images' delay is none of its time


def test_without_the_time_nothing_is_reckoned_of_what_was_sent() -> None:
    router, other = Router(ONE_OF_TWO, HEAVY), Router(ONE_OF_TWO, HEAVY)
    for _ in range(50):
        decision = router.decide(image_shape(), loads(ONE_OF_TWO))

    assert decision == other.decide(image_shape(), loads(ONE_OF_TWO))


def test_a_prompt_that_was_read_before_saves_what_it_would_take_there() -> None:
    shape = RequestShape(0, 640, 128, prefix_key=b"before", prefix_tokens=500)
    rest_s = []
    for prefixes in (frozenset(), frozenset({b"before"})):
        now = loads(ONE_OF_TWO, d0=Load(prefixes=prefixes))
        board = Board(Pools(ONE_OF_TWO, costs_of(ONE_OF_TWO, HEAVY)), limit=12, max_sequences=8, stall_weight=1.0)
        board.follow(now)
        assert board.demand is not None
        board.demand.look(0.0)
        board.demand.send(0, 0.4)
        board.demand.look(1.0)
        pricing = Pricing(board, shape, now)
        rest_s.append(pricing.price_s(0, 0.0) - pricing.prefill_s(0))

    assert rest_s[0] == pytest.approx(rest_s[1])


@pytest.mark.parametrize("policy", ["serial", "split"])
def test_who_always_encodes_in_one_place_does_not_look_at_it(policy: str) -> None:
    both = plan(["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"], "NV12", policy=policy)
    timed, timeless = Router(both, HEAVY), Router(both, HEAVY)
    now = loads(both, d0=Load(running=2, pending_tokens=1500))
    for number in range(40):
        first, second = timed.decide(image_shape(), now, number / 8), timeless.decide(image_shape(), now)

        assert first == second
