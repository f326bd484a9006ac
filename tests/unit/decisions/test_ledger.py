"""What is charged is given back, once, and the router is told of each change."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.decision import Decision, NoReplica, StagesFull
from scheduler.ledger import Ledger, Place
from scheduler.loads import Load, Loads, RequestShape
from scheduler.profile import DecodeTable
from scheduler.routing import Router
from tests.unit.decisions.worlds import COSTS, image_shape, plan

SPREAD = Decision(("e0", "e1", "e0"), "d0", "split", "cost", "fan_out")
SHAPE = RequestShape(3, 1800, 200, image_keys=(b"cat", b"dog", b"owl"))


def ledger(slots: int = 4) -> Ledger:
    """Of two encoders and two decoders."""
    kept = Ledger(Loads({f"e{n}": Load(free_slots=slots) for n in range(2)}, {f"d{n}": Load() for n in range(2)}))
    assert kept.loads.changed is not None
    kept.loads.changed.clear()
    return kept


def test_a_request_is_charged_to_its_replicas_and_given_back() -> None:
    kept = ledger()

    place = kept.take(SPREAD, SHAPE)

    loads = kept.loads
    assert (loads.decoders["d0"].running, loads.decoders["d0"].pending_tokens) == (1, 2000)
    assert [(load.pending_images, load.free_slots) for load in loads.encoders.values()] == [(2, 2), (1, 3)]
    assert loads.changed == {"e0", "e1", "d0"}
    kept.note_encoded(place)
    assert [(load.pending_images, load.free_slots) for load in loads.encoders.values()] == [(0, 2), (0, 3)]
    kept.give_back(place)
    assert (loads.decoders["d0"].running, loads.decoders["d0"].pending_tokens) == (0, 0)
    assert [(load.pending_images, load.free_slots) for load in loads.encoders.values()] == [(0, 4), (0, 4)]


@pytest.mark.parametrize("is_encoded", [False, True])
def test_nothing_is_given_back_twice(is_encoded: bool) -> None:
    kept = ledger()
    place = kept.take(SPREAD, SHAPE)
    if is_encoded:
        kept.note_encoded(place)

    for _ in range(2):
        kept.give_back(place)

    assert [load.pending_images for load in kept.loads.encoders.values()] == [0, 0]
    assert [load.free_slots for load in kept.loads.encoders.values()] == [4, 4]
    assert kept.loads.decoders["d0"].running == 0


def test_it_knows_which_encoder_has_an_image_until_the_store_drops_it() -> None:
    kept = ledger(slots=2)

    kept.take(SPREAD, SHAPE)
    assert kept.loads.holders == {b"cat": {"e0"}, b"owl": {"e0"}, b"dog": {"e1"}}

    kept.take(Decision(("e0",), "d1", "split", "cost", "finish"), RequestShape(1, 600, 10, image_keys=(b"cow",)))
    assert kept.loads.holders == {b"owl": {"e0"}, b"cow": {"e0"}, b"dog": {"e1"}}

    kept.set_available("e0", False)
    assert kept.loads.holders == {b"dog": {"e1"}}
    assert not kept.loads.encoders["e0"].is_available


def test_a_store_that_has_room_again_is_as_cheap_as_before() -> None:
    placed = plan(["cuda:0", "cuda:1"], ["cuda:2"])
    router, shape = Router(placed, COSTS), image_shape()
    kept = Ledger(router.idle())
    for load in kept.loads.encoders.values():
        load.free_slots = 1

    places, chosen = [], []
    for _ in range(2):
        decision = router.decide(shape, kept.loads)
        places.append(kept.take(decision, shape))
        kept.note_encoded(places[-1])
        chosen.append(decision.encoder)
    full = router.decide(shape, kept.loads)
    kept.give_back(places[1])

    assert (chosen, full.encoder) == (["e0", "e1"], "e0")
    assert router.decide(shape, kept.loads).encoder == "e1"


events = st.lists(
    st.tuples(
        st.sampled_from(["take", "encoded", "give back", "die", "return"]),
        st.integers(0, 5),
        st.integers(0, 3),
        st.sampled_from([288, 576, 1152]),
    ),
    max_size=20,
)


@given(st.sampled_from([(2, 2), (1, 3)]), st.booleans(), st.sampled_from([64, 3, 1]), events)
@settings(max_examples=200)
def test_a_router_that_is_told_of_changes_decides_as_one_that_looks_at_everything(
    sizes: tuple[int, int], is_hybrid: bool, slots: int, happened: list[tuple[str, int, int, int]]
) -> None:
    devices = [f"cuda:{n}" for n in range(4)]
    decoders = devices[: sizes[1]] if is_hybrid else devices[-sizes[1] :]
    placed = plan(devices[: sizes[0]], decoders, decode=DecodeTable(max_sequences=2, max_waiting=2), hysteresis=0.0)
    idle = Router(placed, COSTS).idle()
    for load in idle.encoders.values():
        load.free_slots = slots
    told, kept = Router(placed, COSTS), Ledger(idle)
    names = [*kept.loads.encoders, *kept.loads.decoders]
    places: list[Place] = []
    for what, at, num_images, image_tokens in happened:
        keys = tuple(f"{(at + n) % 5}".encode() for n in range(num_images)) if at < 4 else ()
        shape = RequestShape(num_images, 64 + image_tokens * num_images, 128, image_tokens, keys)
        every = Loads(kept.loads.encoders, kept.loads.decoders)
        decisions = [
            decided(router, shape, loads) for router, loads in ((told, kept.loads), (Router(placed, COSTS), every))
        ]
        assert decisions[0] == decisions[1]
        if what == "take" and decisions[0] is not None:
            places.append(kept.take(decisions[0], shape))
        elif what in ("die", "return"):
            kept.set_available(names[at % len(names)], what == "return")
        elif places:
            (kept.note_encoded if what == "encoded" else kept.give_back)(places[at % len(places)])


def decided(router: Router, shape: RequestShape, loads: Loads) -> Decision | None:
    """None where there can be no decision."""
    try:
        return router.decide(shape, loads)
    except (NoReplica, StagesFull):
        return None
