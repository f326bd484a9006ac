"""The cost policy finds the least price, whatever is asked of it, and never looks away from what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.board import Board
from scheduler.cost import Costs, EncodeCost, TransferCost
from scheduler.decision import Decision, NoReplica, StagesFull
from scheduler.demand import FIRST_S, LEAST_SHARE, MEMORY_S
from scheduler.finish import least_finish
from scheduler.loads import Load, Loads, RequestShape
from scheduler.plan import Plan
from scheduler.pools import Pools, costs_of, shares_device
from scheduler.pricing import Pricing
from scheduler.profile import DecodeTable, ScheduleTable
from scheduler.routing import Router
from tests.unit.decisions.worlds import COSTS, every_placement, image_shape, loads, naive_price_s, plan

LINKS = ("NV12", "PIX", "PHB", "SYS", "unknown")
KEYS = (b"cat", b"dog", b"owl")

uneven = COSTS.model_copy(
    update={
        "encode": EncodeCost(batch_s=0.0013, image_s=0.0025, max_batch=2),
        "transfer": TransferCost(hop_s=0.0005, setup_s=30e-6, gigabytes_per_s={"NV12": 230.0}),
    }
)
"""Costs with a price per batch, a hop and a launch."""


@st.composite
def worlds(draw: st.DrawFn, most: int = 3, is_hybrid: bool = True, has_keys: bool = False) -> tuple[Plan, Loads]:
    """A plan with up to `most` replicas per stage, and loads."""
    devices = [f"cuda:{index}" for index in range(2 * most)]
    encoders = draw(st.lists(st.sampled_from(devices if is_hybrid else devices[:most]), min_size=1, max_size=most))
    decoders = draw(st.lists(st.sampled_from(devices if is_hybrid else devices[most:]), min_size=1, max_size=most))
    names = list(dict.fromkeys((*encoders, *decoders)))
    links = {(one, other): draw(st.sampled_from(LINKS)) for at, one in enumerate(names) for other in names[at + 1 :]}
    placed = plan(encoders, decoders, links, decode=DecodeTable(max_sequences=8, max_waiting=4))
    keys = st.frozensets(st.sampled_from(KEYS)) if has_keys else st.just(frozenset())
    encoder = st.builds(Load, pending_images=st.integers(0, 6), cached=keys, is_available=st.integers(0, 4).map(bool))
    decoder = st.builds(
        Load,
        running=st.integers(0, 11),
        pending_tokens=st.integers(0, 20_000),
        free_kv_tokens=st.none() | st.integers(0, 4000),
        cached=keys,
        is_available=st.integers(0, 4).map(bool),
    )
    every = {each.name: draw(encoder) for each in placed.encoders} | {
        each.name: draw(decoder) for each in placed.decoders
    }
    return placed, loads(placed, **every)


def decided(placed: Plan, now: Loads, shape: RequestShape, costs: Costs = uneven) -> Decision | None:
    """The decision of a new router; None where there can be none."""
    try:
        return Router(placed, costs).decide(shape, now)
    except (NoReplica, StagesFull):
        return None


@given(worlds(), st.integers(0, 3))
def test_the_decision_is_the_cheapest_of_all_placements(world: tuple[Plan, Loads], num_images: int) -> None:
    placed, now = world
    shape = image_shape(num_images)
    prices = [
        naive_price_s(placed, uneven, shape, now, spread, decoder)
        for spread, decoder in every_placement(placed, shape, now)
        if now.decoders[decoder].running < 12
    ]

    decision = decided(placed, now, shape)

    assert (decision is None) == (prices == [])
    if decision is not None:
        price_s = naive_price_s(placed, uneven, shape, now, decision.encoders, decision.decoder)
        assert price_s == pytest.approx(min(prices), rel=1e-9)


def pools_of(placed: Plan) -> Pools:
    """The plan's replicas at uneven costs."""
    return Pools(placed, costs_of(placed, uneven))


def priced(placed: Plan, now: Loads, shape: RequestShape, sent_s: Sequence[float] = ()) -> Pricing:
    """All prices of a request; `sent_s` by encoder, of encoding in the second before."""
    board = Board(pools_of(placed), limit=12, max_sequences=8, stall_weight=placed.schedule.stall_weight)
    board.follow(now)
    if board.demand is not None and sent_s:
        board.demand.look(0.0)
        for e, seconds in enumerate(sent_s[: len(placed.encoders)]):
            board.demand.send(e, seconds)
        board.demand.look(1.0)
    return Pricing(board, shape, now)


@st.composite
def shapes(draw: st.DrawFn) -> RequestShape:
    """Up to four images, of known or unknown content and size."""
    num_images = draw(st.integers(0, 4))
    keys: Sequence[bytes] = draw(st.lists(st.sampled_from(KEYS), min_size=num_images, max_size=num_images))
    return image_shape(
        num_images,
        image_keys=tuple(keys) if draw(st.booleans()) else (),
        image_tokens=draw(st.sampled_from((576, 576, 1152, 144))),
    )


@given(worlds(most=6, has_keys=True), shapes(), st.lists(st.floats(0, 2), min_size=6, max_size=6) | st.just([]))
@settings(max_examples=300)
def test_leaving_decoders_out_by_their_bound_leaves_out_no_better_one(
    world: tuple[Plan, Loads], shape: RequestShape, sent_s: list[float]
) -> None:
    pricing = priced(*world, shape, sent_s)
    everything = []
    for d in range(len(world[0].decoders)):
        if pricing.bounds[d] < inf:
            side_s = pricing.assign(d).side_s if shape.num_images else 0.0
            everything.append((pricing.price_s(d, side_s), d))
            assert pricing.bounds[d] <= pricing.price_s(d, side_s)

    d, assignment = least_finish(pricing, shape.num_images > 0)

    found = (pricing.price_s(d, assignment.side_s if assignment else 0.0), d) if d >= 0 else None
    assert found == (min(everything) if everything else None)


@given(worlds(most=6, has_keys=True), st.lists(shapes(), min_size=1, max_size=12))
def test_who_explains_nothing_decides_the_same(world: tuple[Plan, Loads], asked: list[RequestShape]) -> None:
    placed, now = world
    told: list[list[object]] = [[], []]
    for predicts in (True, False):
        router = Router(placed, uneven, predicts=predicts)
        for index, shape in enumerate(asked):
            try:
                decision = router.decide(shape, now, index * 0.1)
            except (NoReplica, StagesFull) as error:
                told[predicts].append(str(error))
            else:
                told[predicts].append((decision.encoders, decision.decoder, decision.mode, decision.reason_kind))

    assert told[False] == told[True]


@given(worlds(), st.integers(0, 3), st.lists(st.floats(0, 3), min_size=3, max_size=3), st.sampled_from((1.0, 0.3, 0)))
def test_the_price_knows_what_devices_were_asked_to_encode(
    world: tuple[Plan, Loads], num_images: int, sent_s: list[float], stall_weight: float
) -> None:
    placed, now = world
    placed = placed.model_copy(update={"schedule": ScheduleTable(stall_weight=stall_weight)})
    shape = image_shape(num_images)
    pricing = priced(placed, now, shape, sent_s)
    memory_s = MEMORY_S * (1 - exp(-(1 + FIRST_S) / MEMORY_S))
    asked = {}
    for decoder in placed.decoders:
        own = [e for e, each in enumerate(placed.encoders) if shares_device(each, decoder)]
        share = sum(sent_s[e] for e in own) * exp(-1 / MEMORY_S) / memory_s
        asked[decoder.name] = max(share, LEAST_SHARE) if own else 0.0

    d, assignment = least_finish(pricing, num_images > 0)

    prices = [
        naive_price_s(placed, uneven, shape, now, spread, decoder, asked)
        for spread, decoder in every_placement(placed, shape, now)
        if now.decoders[decoder].running < 12
    ]
    assert (d < 0) == (prices == [])
    if d >= 0:
        price_s = pricing.price_s(d, assignment.side_s if assignment else 0.0)
        assert price_s == pytest.approx(min(prices), rel=1e-9)


@given(worlds(), st.integers(0, 3))
def test_what_is_not_available_is_not_chosen(world: tuple[Plan, Loads], num_images: int) -> None:
    placed, now = world

    decision = decided(placed, now, image_shape(num_images))

    if decision is not None:
        assert now.decoders[decision.decoder].is_available
        assert all(now.encoders[name].is_available for name in decision.encoders)


@given(worlds(), st.integers(0, 3))
def test_an_error_says_which_stage_is_missing(world: tuple[Plan, Loads], num_images: int) -> None:
    placed, now = world
    has_decoder = any(load.is_available for load in now.decoders.values())
    has_encoder = any(load.is_available for load in now.encoders.values())
    if has_decoder and (has_encoder or not num_images):
        return

    with pytest.raises(NoReplica) as refused:
        Router(placed, COSTS).decide(image_shape(num_images), now)
    assert str(refused.value) == f"no {'encoder' if has_decoder else 'decoder'} is available"


more = st.fixed_dictionaries(
    {"pending_images": st.integers(0, 3), "running": st.integers(0, 2), "pending_tokens": st.integers(0, 5000)}
)


@given(worlds(is_hybrid=False), st.integers(0, 2), st.integers(0, 5), more)
def test_more_load_makes_a_replica_no_more_attractive(
    world: tuple[Plan, Loads], num_images: int, at: int, added: dict[str, int]
) -> None:
    placed, now = world
    shape = image_shape(num_images)
    before = decided(placed, now, shape)
    everybody = {**now.encoders, **now.decoders}
    name = list(everybody)[at % len(everybody)]
    old = everybody[name]
    heavier = replace(old, **{key: getattr(old, key) + value for key, value in added.items()})
    side = now.encoders if name in now.encoders else now.decoders
    side[name] = heavier  # type: ignore[index]

    after = decided(placed, now, shape)

    if before is not None and after is not None:
        used_before = [*before.encoders, before.decoder].count(name)
        assert [*after.encoders, after.decoder].count(name) <= used_before


@given(worlds(), st.integers(1, 3), st.integers(0, 5), more)
def test_more_load_anywhere_makes_nothing_cheaper(
    world: tuple[Plan, Loads], num_images: int, at: int, added: dict[str, int]
) -> None:
    placed, now = world
    shape = image_shape(num_images)
    before = priced(placed, now, shape)
    prices = [before.price_s(d, before.assign(d).side_s) for d in range(len(placed.decoders))]
    everybody = {**now.encoders, **now.decoders}
    load = list(everybody.values())[at % len(everybody)]
    load.running += added["running"]
    load.pending_images += added["pending_images"]
    load.pending_tokens += added["pending_tokens"]

    after = priced(placed, now, shape)

    for d, price_s in enumerate(prices):
        assert after.price_s(d, after.assign(d).side_s) >= price_s


@given(worlds(), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_a_mode_changes_only_for_a_gain_above_the_hysteresis(
    world: tuple[Plan, Loads], requests: list[tuple[int, int, int]]
) -> None:
    placed, now = world
    router = Router(placed, uneven)
    modes: dict[str, str] = {}
    for num_images, running, pending in requests:
        for load in now.decoders.values():
            load.running = running
        next(iter(now.encoders.values())).pending_images = pending
        try:
            decision = router.decide(image_shape(num_images), now)
        except (NoReplica, StagesFull):
            return
        place = decision.stages[-1].device
        if modes.get(place, decision.mode) != decision.mode and decision.alternative is not None:
            price_s = max(stage.weight for stage in decision.stages[:-1])
            assert decision.alternative.price_s > price_s * (1 + placed.schedule.hysteresis) * (1 - 1e-9)
        modes[place] = decision.mode


@given(worlds(has_keys=True), st.lists(shapes(), max_size=6))
def test_the_same_requests_are_placed_the_same_way(world: tuple[Plan, Loads], requests: list[RequestShape]) -> None:
    placed, now = world
    one, other = Router(placed, uneven), Router(placed, uneven)
    for shape in requests:
        try:
            assert one.decide(shape, now) == other.decide(shape, now)
        except (NoReplica, StagesFull):
            return


def test_an_encoder_without_a_free_slot_is_the_last_resort() -> None:
    world = plan(["cuda:1", "cuda:2"], ["cuda:0"], "NV12")
    router = Router(world, COSTS)
    full = Load(free_slots=0)

    one = router.decide(image_shape(), loads(world, e0=full, e1=Load(pending_images=40)))
    both = router.decide(image_shape(), loads(world, e0=full, e1=Load(free_slots=0, pending_images=40)))

    assert (one.encoder, both.encoder) == ("e1", "e0")


def test_full_decoders_are_an_overload_with_the_time_until_a_place_is_free() -> None:
    world = plan(["cuda:1"], ["cuda:0", "cuda:2"], decode=DecodeTable(max_sequences=4, max_waiting=2))
    router = Router(world, COSTS)
    now = loads(world, d0=Load(running=7, pending_tokens=4000), d1=Load(running=6, pending_tokens=4000))

    assert not router.has_room(now)
    with pytest.raises(StagesFull) as refused:
        router.decide(image_shape(), now)

    assert str(refused.value) == "all 2 decoders are full: each holds 6 requests or more, 6 allowed"
    step_s = (13e9 + 4000 * 524_288) / 2e12
    assert refused.value.retry_after_s == pytest.approx(round(128 * step_s * 1 / 4, 1))


def test_one_place_is_enough_to_be_taken() -> None:
    world = plan(["cuda:1"], ["cuda:0", "cuda:2"], decode=DecodeTable(max_sequences=4, max_waiting=2))
    router = Router(world, COSTS)
    now = loads(world, d0=Load(running=6), d1=Load(running=5))

    assert router.has_room(now)
    assert router.decide(image_shape(), now).decoder == "d1"


def test_what_was_observed_moves_later_decisions() -> None:
    world = plan(["cuda:1", "cuda:2"], ["cuda:0"], "NV12")
    router = Router(world, COSTS)
    for _ in range(20):
        decision = router.decide(image_shape(), loads(world))
        if decision.encoder == "e1":
            break
        router.observe("encode", "e0", decision.encode_s, 0.010)

    assert decision.encoder == "e1"
    assert router.factor("encode", "e0") > 1
    assert router.factor("encode", "e1") == 1


@pytest.mark.parametrize(("stage", "replica"), [("encode", "d0"), ("transfer", "e0"), ("thinking", "d0")])
def test_only_stages_of_the_plan_are_observed(stage: str, replica: str) -> None:
    with pytest.raises(ValueError, match="allowed: encode, transfer, prefill, decode"):
        Router(plan(["cuda:1"], ["cuda:0"]), COSTS).observe(stage, replica, 1.0, 1.0)


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="policy 'luck'; allowed: 'cost', 'article'"):
        Router(plan(["cuda:1"], ["cuda:0"]), COSTS, policy="luck")


def test_a_load_that_nobody_told_of_is_not_available() -> None:
    world = plan(["cuda:1"], ["cuda:0", "cuda:2"])

    assert Router(world, COSTS).decide(image_shape(), Loads({"e0": Load()}, {"d1": Load()})).decoder == "d1"
