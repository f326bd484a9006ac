"""What is charged is given back, once, and the router is told of each change."""

from __future__ import annotations

import pytest

from scheduler.decision import Decision
from scheduler.ledger import Ledger
from scheduler.loads import Load, Loads, RequestShape

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
