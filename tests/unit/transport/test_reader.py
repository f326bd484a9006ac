"""Reading by handle: equal bytes in another process, and nothing at all once they are gone."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from python_backend.errors import EmbeddingGone, HandleRefused
from python_backend.transport.boot import BootKey
from python_backend.transport.handle import DType, EmbeddingHandle
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.reader import EmbeddingReader
from python_backend.transport.segment import Segment
from python_backend.transport.store import EmbeddingStore

if TYPE_CHECKING:
    from tests.unit.transport.conftest import Clock, Peer

SHAPE = (4, 8)
VALUES = np.arange(32, dtype=np.float16).reshape(SHAPE)


def put(store: EmbeddingStore, name: str = "a", values: npt.NDArray[np.float16] = VALUES) -> EmbeddingHandle:
    slot = store.reserve(name.encode().ljust(16, b"."), SHAPE, "float16")
    slot.array[...] = values
    return store.commit(slot)


@pytest.fixture
def reader(shared_memory: Path) -> EmbeddingReader:
    return EmbeddingReader(shared_memory)


def test_bytes_written_by_one_process_read_equal_in_another(
    store: EmbeddingStore, boot: BootKey, clock: Clock, new_peer: Callable[[], Peer]
) -> None:
    handle = put(store)
    sealed = handle.seal(boot).hex()
    peer = new_peer()
    assert peer.ask("read", sealed) == hashlib.sha256(VALUES.tobytes()).hexdigest()
    assert peer.ask("release", sealed) == "released"
    assert store.sweep(clock()) == 1


def test_an_embedding_of_another_process_reads_equal_here(
    reader: EmbeddingReader, boot: BootKey, fingerprint: bytes, new_peer: Callable[[], Peer]
) -> None:
    owner = new_peer()
    owner.ask("create")
    handle = EmbeddingHandle.open(bytes.fromhex(owner.ask("put", "a", "7")), boot, fingerprint)
    expected = np.random.default_rng(7).standard_normal(SHAPE).astype(np.float16)
    np.testing.assert_array_equal(reader.read(handle), expected)
    owner.ask("close")


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("float16", np.arange(8, dtype=np.float16)),
        ("float32", np.arange(8, dtype=np.float32)),
        ("bfloat16", np.arange(8, dtype=np.uint16)),
    ],
)
def test_each_dtype_comes_back_as_it_went(
    store: EmbeddingStore, reader: EmbeddingReader, dtype: DType, values: npt.NDArray[np.generic]
) -> None:
    slot = store.reserve(bytes(16), (2, 4), dtype)
    slot.array[...] = values.reshape(2, 4)
    handle = store.commit(slot)
    out = np.zeros((2, 4), values.dtype)
    reader.copy(handle, out)
    np.testing.assert_array_equal(out, values.reshape(2, 4))
    np.testing.assert_array_equal(reader.read(handle), out)
    reader.release(handle)


def test_what_is_read_in_place_cannot_be_written(store: EmbeddingStore, reader: EmbeddingReader) -> None:
    handle = put(store)
    with pytest.raises(ValueError, match="read-only"):
        reader.read(handle)[0, 0] = 1
    reader.release(handle)


def test_a_stale_handle_reads_nothing(store: EmbeddingStore, reader: EmbeddingReader) -> None:
    handle = put(store)
    store.release(handle)
    others = [put(store, name) for name in ("b", "c", "d")]
    out = np.zeros(SHAPE, np.float16)
    for read in (lambda: reader.read(handle), lambda: reader.copy(handle, out)):
        with pytest.raises(EmbeddingGone, match=r"given to a newer one \(generation 2, now 4\)"):
            read()
    assert not out.any()
    for other in others:
        reader.release(other)


def test_a_reader_later_than_its_lease_gets_embedding_gone(
    store: EmbeddingStore, reader: EmbeddingReader, clock: Clock
) -> None:
    late = put(store)
    clock.now_s += 120.0
    others = [put(store, name) for name in ("b", "c", "d")]
    with pytest.raises(EmbeddingGone, match="given to a newer one"):
        reader.read(late)
    reader.release(late)
    for other in others:
        reader.release(other)


def test_a_lease_that_ran_out_is_over_for_its_holder_before_the_slot_is_given_away(
    store: EmbeddingStore, reader: EmbeddingReader, clock: Clock
) -> None:
    late = put(store)
    clock.now_s += 120.0
    store.sweep(clock())
    with pytest.raises(EmbeddingGone, match=r"the lease on embedding .* is over: returned or run out"):
        reader.read(late)


def test_a_lease_that_is_over_allows_a_checked_copy_but_no_reading_in_place(
    store: EmbeddingStore, reader: EmbeddingReader
) -> None:
    handle = put(store)
    reader.release(handle)
    with pytest.raises(EmbeddingGone, match=r"the lease on embedding .* is over"):
        reader.read(handle)
    out = np.zeros(SHAPE, np.float16)
    reader.copy(handle, out)
    np.testing.assert_array_equal(out, VALUES)


def test_a_slot_given_away_during_the_copy_is_noticed(
    store: EmbeddingStore, reader: EmbeddingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = put(store)
    store.release(handle)
    copy = np.copyto
    others: list[EmbeddingHandle] = []

    def copy_while_evicted(out: npt.NDArray[np.generic], source: npt.NDArray[np.generic]) -> None:
        others.extend(put(store, name) for name in ("b", "c", "d"))
        copy(out, source)

    monkeypatch.setattr(np, "copyto", copy_while_evicted)
    with pytest.raises(EmbeddingGone, match="given to a newer one"):
        reader.copy(handle, np.zeros(SHAPE, np.float16))
    for other in others:
        store.release(other)


def test_a_check_after_use_tells_whether_it_was_still_there(store: EmbeddingStore, reader: EmbeddingReader) -> None:
    handle = put(store)
    seen = [reader.holds(handle)]
    reader.release(handle)
    assert [*seen, reader.holds(handle)] == [True, False]


def test_an_owner_that_closed_is_gone_at_once(store: EmbeddingStore, reader: EmbeddingReader, segment: Segment) -> None:
    handle = put(store)
    view = reader.read(handle)
    store.close()
    with pytest.raises(EmbeddingGone, match=f"{segment.name} is gone"):
        reader.read(handle)
    assert reader.num_segments == 0
    np.testing.assert_array_equal(view, VALUES)  # memory that was mapped stays valid
    reader.release(handle)  # and a release of what is gone is no error


def test_an_owner_that_was_killed_is_gone_to_a_new_reader(
    shared_memory: Path,
    reader: EmbeddingReader,
    boot: BootKey,
    fingerprint: bytes,
    new_peer: Callable[[], Peer],
) -> None:
    owner = new_peer()
    name = owner.ask("create")
    handle = EmbeddingHandle.open(bytes.fromhex(owner.ask("put", "a", "7")), boot, fingerprint)
    owner.kill()
    with pytest.raises(EmbeddingGone, match=f"{name} is gone: its owner died"):
        reader.read(handle)
    reader.release(handle)
    (shared_memory / name).unlink()


def test_a_reader_that_was_killed_pins_its_slot_only_until_its_lease_runs_out(
    store: EmbeddingStore, boot: BootKey, clock: Clock, new_peer: Callable[[], Peer]
) -> None:
    peer = new_peer()
    peer.ask("read", put(store).seal(boot).hex())
    peer.kill()
    assert not store.has_room(3)
    clock.now_s += 120.0
    assert store.has_room(3)


def test_a_handle_of_another_key_is_refused_in_another_process_and_nothing_is_read(
    store: EmbeddingStore, boot: BootKey, new_peer: Callable[[], Peer]
) -> None:
    handle = put(store)
    forged = handle.seal(BootKey(boot.id, bytes(32))).hex()
    answer = new_peer().ask("read", forged)
    assert answer == (
        "HandleRefused [INVALID_ARGUMENT] embedding handle with a wrong seal: "
        "forged, damaged, or issued before this server started"
    )
    store.release(handle)


@pytest.mark.parametrize(
    "change",
    [
        lambda handle: replace(handle, slot=3),
        lambda handle: replace(handle, slot=1),
        lambda handle: replace(handle, offset=0),
        lambda handle: replace(handle, shape=(5, 8)),
        lambda handle: replace(handle, shape=(0, 8)),
        lambda handle: replace(handle, shape=(2**31, 2**31)),
        lambda handle: replace(handle, dtype="float32"),
        lambda handle: replace(handle, lease_index=6),
    ],
)
def test_a_handle_that_does_not_fit_its_segment_is_refused(
    store: EmbeddingStore, reader: EmbeddingReader, change: Callable[[EmbeddingHandle], EmbeddingHandle]
) -> None:
    handle = put(store)
    with pytest.raises(HandleRefused, match="out of bounds"):
        reader.read(change(handle))
    store.release(handle)


def test_a_handle_never_opens_a_path(store: EmbeddingStore, reader: EmbeddingReader) -> None:
    handle = put(store)
    for name in ("../../../etc/passwd", "/etc/passwd", ""):
        with pytest.raises(HandleRefused, match="not the name of an embedding segment"):
            reader.read(replace(handle, segment=name))
    assert reader.num_segments == 0
    store.release(handle)


@pytest.mark.parametrize("out", [np.zeros((4, 7), np.float16), np.zeros(SHAPE, np.float32)])
def test_a_copy_wants_its_own_shape_and_dtype(
    store: EmbeddingStore, reader: EmbeddingReader, out: npt.NDArray[np.generic]
) -> None:
    handle = put(store)
    with pytest.raises(ValueError, match="does not go into"):
        reader.copy(handle, out)
    store.release(handle)


def test_attached_segments_are_bounded_and_those_of_closed_owners_dropped(
    shared_memory: Path, boot: BootKey, fingerprint: bytes, clock: Clock
) -> None:
    reader = EmbeddingReader(shared_memory, max_segments=2)
    stores = [
        EmbeddingStore(Segment.create(boot.id, SegmentLayout(1, 64, 1), shared_memory), fingerprint, clock)
        for _ in range(4)
    ]
    handles = [put(store) for store in stores]

    def num_maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(shared_memory))

    num_maps_of_owners = num_maps()
    for handle in handles[:3]:
        reader.read(handle)
    assert reader.num_segments == 2
    assert num_maps() <= num_maps_of_owners + 2 * 3
    for store in stores[:3]:
        store.close()
    reader.read(handles[3])
    assert reader.num_segments == 1
    stores[3].close()


def test_descriptors_do_not_pile_up(store: EmbeddingStore, shared_memory: Path) -> None:
    handle = put(store)
    num_files = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        EmbeddingReader(shared_memory).read(handle)
    assert len(os.listdir("/proc/self/fd")) == num_files
    store.release(handle)


def test_threads_share_a_reader(store: EmbeddingStore, reader: EmbeddingReader, clock: Clock) -> None:
    handles = [put(store)]
    handles += [found for _ in range(5) if (found := store.find(handles[0].digest)) is not None]
    good: list[bool] = []

    def work(handle: EmbeddingHandle) -> None:
        out = np.zeros(SHAPE, np.float16)
        for _ in range(200):
            reader.copy(handle, out)
            good.append(bool((out == VALUES).all()))
        reader.release(handle)

    threads = [threading.Thread(target=work, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (good.count(True), len(good), reader.num_segments) == (1200, 1200, 1)
    assert store.sweep(clock()) == 6
