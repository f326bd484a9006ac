"""The store: what is leased stays, what is not is evicted in order, and a full store says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from python_backend.errors import Overloaded
from python_backend.transport.handle import EmbeddingHandle
from python_backend.transport.leases import give_back, is_held
from python_backend.transport.reader import EmbeddingReader
from python_backend.transport.segment import Segment
from python_backend.transport.store import EmbeddingStore, StoreCounts

if TYPE_CHECKING:
    from tests.unit.transport.conftest import Clock

SHAPE = (4, 8)


def key(name: str) -> bytes:
    """A content digest that can be read in a test."""
    return name.encode().ljust(16, b".")


def put(store: EmbeddingStore, name: str) -> EmbeddingHandle:
    """An embedding of `name` committed and leased."""
    return store.commit(store.reserve(key(name), SHAPE, "float16"))


def put_unleased(store: EmbeddingStore, name: str) -> EmbeddingHandle:
    """An embedding of `name` committed, its lease given back."""
    handle = put(store, name)
    store.release(handle)
    return handle


def names(store: EmbeddingStore, *candidates: str) -> list[str]:
    """Which of the candidates are found; leaves no lease behind."""
    found = []
    for name in candidates:
        handle = store.find(key(name))
        if handle is not None:
            store.release(handle)
            found.append(name)
    return found


def test_what_is_not_committed_is_not_found(store: EmbeddingStore) -> None:
    slot = store.reserve(key("a"), SHAPE, "float16")
    assert store.find(key("a")) is None
    store.release(store.commit(slot))
    assert names(store, "a") == ["a"]


def test_the_generation_is_odd_while_written_and_even_when_stable(store: EmbeddingStore, segment: Segment) -> None:
    slot = store.reserve(key("a"), SHAPE, "float16")
    seen = [segment.generation[slot.index]]
    handle = store.commit(slot)
    seen.append(segment.generation[slot.index])
    assert (seen, handle.generation) == ([1, 2], 2)
    store.release(handle)


def test_the_same_key_is_a_hit_and_shares_the_slot_under_its_own_lease(store: EmbeddingStore) -> None:
    first = put(store, "a")
    second = store.find(key("a"))
    assert second is not None
    assert (second.slot, second.generation) == (first.slot, first.generation)
    assert (second.lease_index, second.lease_id) != (first.lease_index, first.lease_id)
    assert store.counts == StoreCounts(
        num_hits=1, num_misses=0, num_evictions=0, num_leases_out=2, num_embeddings=1, num_slots=3
    )
    store.release(first)
    assert not store.has_room(3)  # the second lease still holds the slot
    store.release(second)


def test_the_least_recently_used_is_evicted_first(store: EmbeddingStore) -> None:
    for name in ("a", "b", "c"):
        put_unleased(store, name)
    assert names(store, "a") == ["a"]  # used again: now b is the oldest
    put_unleased(store, "d")
    put_unleased(store, "e")
    assert names(store, "a", "b", "c", "d", "e") == ["a", "d", "e"]
    assert store.counts.num_evictions == 2


def test_a_leased_slot_is_never_evicted(store: EmbeddingStore) -> None:
    leased = put(store, "a")
    for name in "bcdefg":
        put_unleased(store, name)
    assert names(store, "a", "f", "g") == ["a", "f", "g"]
    store.release(leased)


def test_a_full_store_says_how_full_it_is(store: EmbeddingStore) -> None:
    handles = [put(store, "a"), put(store, "b")]
    slot = store.reserve(key("c"), SHAPE, "float16")
    assert not store.has_room()
    with pytest.raises(
        Overloaded, match="of 3 slots 2 are leased and 1 are being written, 2 leases are out; retry after 1 s"
    ):
        store.reserve(key("d"), SHAPE, "float16")
    store.abandon(slot)
    for handle in handles:
        store.release(handle)


def test_no_lease_left_says_so_and_changes_nothing(store: EmbeddingStore) -> None:
    handles = [put(store, "a")]
    while len(handles) < 6:
        found = store.find(key("a"))
        assert found is not None
        handles.append(found)
    before = store.counts
    assert not store.has_room()
    with pytest.raises(Overloaded, match="all 6 leases are out"):
        store.find(key("a"))
    with pytest.raises(Overloaded, match="all 6 leases are out"):
        store.reserve(key("b"), SHAPE, "float16")
    assert store.counts == before
    for handle in handles:
        store.release(handle)


def test_a_slot_being_written_has_its_lease_set_aside(store: EmbeddingStore) -> None:
    handles = [put(store, "a")]
    slot = store.reserve(key("b"), SHAPE, "float16")
    handles += [handle for _ in range(4) if (handle := store.find(key("a"))) is not None]
    with pytest.raises(Overloaded, match="all 6 leases are out"):
        store.find(key("a"))
    handles.append(store.commit(slot))
    for handle in handles:
        store.release(handle)


def test_an_abandoned_slot_is_free_again_and_was_never_seen(store: EmbeddingStore, segment: Segment) -> None:
    put_unleased(store, "a")
    slot = store.reserve(key("b"), SHAPE, "float16")
    store.abandon(slot)
    assert names(store, "a", "b") == ["a"]
    assert segment.generation[slot.index] % 2 == 0
    assert store.has_room(3)


def test_a_slot_ends_once(store: EmbeddingStore) -> None:
    slot = store.reserve(key("a"), SHAPE, "float16")
    store.release(store.commit(slot))
    for end in (store.commit, store.abandon):
        with pytest.raises(ValueError, match="committed or abandoned already"):
            end(slot)


def test_an_embedding_larger_than_a_slot_is_refused_and_nothing_is_evicted(store: EmbeddingStore) -> None:
    for name in ("a", "b", "c"):
        put_unleased(store, name)
    with pytest.raises(ValueError, match=r"takes 128 bytes, a slot of .* has 64"):
        store.reserve(key("d"), SHAPE, "float32")
    assert names(store, "a", "b", "c") == ["a", "b", "c"]


def test_a_newer_embedding_of_a_key_takes_it_and_the_older_stays_readable(
    store: EmbeddingStore, segment: Segment
) -> None:
    twice = [store.reserve(key("a"), SHAPE, "float16") for _ in range(2)]
    older, newer = (store.commit(slot) for slot in twice)
    found = store.find(key("a"))
    assert found is not None
    assert (found.slot, older.slot != newer.slot) == (newer.slot, True)
    assert segment.generation[older.slot] == older.generation
    assert store.has_room(1)
    assert not store.has_room(2)
    store.release(older)
    assert store.has_room(2)  # nobody can find the older one, so its slot is free
    for handle in (newer, found):
        store.release(handle)


def test_a_returned_lease_frees_its_slot_at_the_next_sweep(
    store: EmbeddingStore, segment: Segment, clock: Clock
) -> None:
    reader = EmbeddingReader(segment.path.parent)
    handle = put(store, "a")
    reader.release(handle)
    assert store.counts.num_leases_out == 1
    assert [store.sweep(clock()), store.sweep(clock())] == [1, 0]
    assert store.counts.num_leases_out == 0


def test_a_second_release_does_no_harm(store: EmbeddingStore, segment: Segment, clock: Clock) -> None:
    reader = EmbeddingReader(segment.path.parent)
    first = put(store, "a")
    second = store.find(key("a"))
    assert second is not None
    for _ in range(3):
        reader.release(first)
        store.sweep(clock())
        store.release(first)
    assert (store.counts.num_leases_out, is_held(segment, second.lease_index, second.lease_id)) == (1, True)
    store.release(second)


def test_a_late_return_of_an_old_lease_does_not_free_a_newer_one(
    store: EmbeddingStore, segment: Segment, clock: Clock
) -> None:
    reader = EmbeddingReader(segment.path.parent)
    old = put(store, "a")
    clock.now_s += 120.0
    store.sweep(clock())
    while (newer := put(store, "a")).lease_index != old.lease_index:
        store.release(newer)
    reader.release(old)
    segment.returned[old.lease_index] = old.lease_id  # even if it stored at the worst moment
    assert store.sweep(clock()) == 0
    assert is_held(segment, newer.lease_index, newer.lease_id)
    reader.release(newer)
    reader.release(old)  # must not cover the return of the newer one
    assert store.sweep(clock()) == 1


@pytest.mark.parametrize(("waited_s", "is_evictable"), [(119.9, False), (120.0, True)])
def test_a_lease_that_ran_out_makes_its_slot_evictable(
    store: EmbeddingStore, clock: Clock, waited_s: float, is_evictable: bool
) -> None:
    handles = [put(store, name) for name in ("a", "b", "c")]
    clock.now_s += waited_s
    assert store.has_room(3) == is_evictable
    assert names(store, "a", "b", "c") == ["a", "b", "c"]  # by itself, running out takes nothing away
    for handle in handles:
        store.release(handle)


def test_a_shape_smaller_than_the_slot_leaves_the_rest_alone(store: EmbeddingStore, segment: Segment) -> None:
    slot = store.reserve(key("a"), (2, 3), "bfloat16")
    slot.array[...] = 0xFFFF
    assert slot.array.dtype == np.uint16
    whole = segment.view(slot.index, (1, 32), np.dtype(np.uint16))[0].tolist()
    assert whole == [0xFFFF] * 6 + [0] * 26
    store.abandon(slot)


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_key_is_16_bytes(store: EmbeddingStore, size: int) -> None:
    for call in (store.find, lambda key: store.reserve(key, SHAPE, "float16")):
        with pytest.raises(ValueError, match=f"16 bytes, this has {size}"):
            call(bytes(size))


def test_a_lease_that_was_given_back_is_not_held_also_before_a_sweep(store: EmbeddingStore, segment: Segment) -> None:
    first, second = put(store, "a"), put(store, "b")
    held_before = store.num_leases_held

    give_back(segment, first.lease_index, first.lease_id)

    assert (held_before, store.num_leases_held, store.counts.num_leases_out) == (2, 1, 2)
    store.release(first)
    store.release(second)
