"""Any order of finds, encodings, releases and lapses keeps the promises of the store."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from python_backend.errors import EmbeddingGone, Overloaded
from python_backend.transport.boot import boot_key
from python_backend.transport.handle import EmbeddingHandle
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.reader import EmbeddingReader
from python_backend.transport.segment import Segment
from python_backend.transport.store import EmbeddingStore, Slot

SHAPE = (2, 4)
NUM_SLOTS, NUM_LEASES, LEASE_S = 3, 5, 10.0
names = some.sampled_from("abcde")


class StoreMachine(RuleBasedStateMachine):
    """The store against a model: which handles are leased until when, and what each must read as."""

    handles = Bundle("handles")
    slots = Bundle("slots")

    @initialize()
    def start(self) -> None:
        self.now_s = 0.0
        self.directory = tempfile.TemporaryDirectory(prefix="vlm_relay_test.", dir="/dev/shm")
        path = Path(self.directory.name)
        boot = boot_key(os.getppid(), path)
        self.segment = Segment.create(boot.id, SegmentLayout(NUM_SLOTS, 16, NUM_LEASES), path)
        self.store = EmbeddingStore(self.segment, bytes(16), lambda: self.now_s, LEASE_S)
        self.reader = EmbeddingReader(path)
        self.leases: dict[int, tuple[EmbeddingHandle, float]] = {}  # by lease id: until when, not returned
        self.values: dict[tuple[int, int], int] = {}  # by slot and generation
        self.latest: dict[bytes, int] = {}  # by key: the value committed last
        self.writing: dict[int, Slot] = {}
        self.next_value = 1

    def lease(self, handle: EmbeddingHandle) -> EmbeddingHandle:
        assert handle.lease_id not in self.leases
        self.leases[handle.lease_id] = (handle, self.now_s + LEASE_S)
        return handle

    def live(self) -> list[EmbeddingHandle]:
        return [handle for handle, until_s in self.leases.values() if self.now_s < until_s]

    @rule(target=handles, name=names)
    def find(self, name: str) -> object:
        key = name.encode() * 16
        try:
            handle = self.store.find(key)
        except Overloaded:
            assert len(self.live()) + len(self.writing) == NUM_LEASES
            return multiple()
        if handle is None:
            held = [self.values[lent.slot, lent.generation] for lent in self.live() if lent.digest == key]
            assert self.latest.get(key) not in held
            return multiple()
        assert self.values[handle.slot, handle.generation] == self.latest[key]
        return self.lease(handle)

    @rule(target=slots, name=names)
    def reserve(self, name: str) -> object:
        busy = {handle.slot for handle in self.live()} | set(self.writing)
        has_lease = len(self.live()) + len(self.writing) < NUM_LEASES
        assert self.store.has_room() == (len(busy) < NUM_SLOTS and has_lease)
        try:
            slot = self.store.reserve(name.encode() * 16, SHAPE, "bfloat16")
        except Overloaded:
            assert len(busy) == NUM_SLOTS or not has_lease
            return multiple()
        assert slot.index not in busy
        self.writing[slot.index] = slot
        slot.array[...] = 0
        return slot

    @rule(target=handles, slot=consumes(slots))
    def commit(self, slot: Slot) -> EmbeddingHandle:
        slot.array[...] = self.next_value
        handle = self.store.commit(slot)
        del self.writing[slot.index]
        self.values[handle.slot, handle.generation] = self.next_value
        self.latest[slot.key] = self.next_value
        self.next_value += 1
        return self.lease(handle)

    @rule(slot=consumes(slots))
    def abandon(self, slot: Slot) -> None:
        self.store.abandon(slot)
        del self.writing[slot.index]

    @rule(handle=handles, by_owner=some.booleans())
    def release(self, handle: EmbeddingHandle, by_owner: bool) -> None:
        """The same handle may come again, and long after its lease ran out."""
        (self.store if by_owner else self.reader).release(handle)
        self.leases.pop(handle.lease_id, None)

    @rule(handle=handles)
    def read(self, handle: EmbeddingHandle) -> None:
        out = np.zeros(SHAPE, np.uint16)
        try:
            self.reader.copy(handle, out)
        except EmbeddingGone:
            assert handle not in self.live()
        else:
            assert (out == self.values[handle.slot, handle.generation]).all()

    @rule(passed_s=some.sampled_from([0.1, 3.0, LEASE_S]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def sweep(self) -> None:
        self.store.sweep(self.now_s)
        assert self.store.counts.num_leases_out == len(self.live())

    @invariant()
    def every_live_lease_reads_what_it_was_given(self) -> None:
        for handle in self.live():
            assert (self.reader.read(handle) == self.values[handle.slot, handle.generation]).all()

    def teardown(self) -> None:
        for slot in list(self.writing.values()):
            self.store.abandon(slot)
        for handle, _ in self.leases.values():
            self.reader.release(handle)
        self.store.sweep(self.now_s)
        assert self.store.counts.num_leases_out == 0
        assert self.store.has_room(NUM_SLOTS)
        self.store.close()
        assert not list(Path(self.directory.name).glob(f"{self.segment.name[:-16]}*"))
        self.directory.cleanup()


TestStoreMachine = pytest.mark.filterwarnings("error")(StoreMachine.TestCase)
TestStoreMachine.settings = settings(max_examples=150, stateful_step_count=60)
