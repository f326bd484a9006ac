"""The owner's side of the embeddings in one segment: which slot holds what, and who may still read it.

          reserve      commit               find                leases over           reserve of another
    free ─────────▶ written ─────▶ leased once ────▶ leased again ─────▶ may be evicted ─────▶ written
    generation      odd            even                                                        odd

A slot is found by the content it was made from. When a newer embedding of the same content is committed, the
older one is unlisted: nobody finds it any more, and its slot is free once its leases are over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from python_backend.errors import Overloaded
from python_backend.transport.handle import DIGEST_BYTES, NUMPY_DTYPES, DType, EmbeddingHandle
from python_backend.transport.leases import LeaseTable
from python_backend.transport.segment import Rows, Segment, fence

LEASE_S = 120.0  # longer than any wait between encode and prefill, short enough to outlive a dead decoder


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A slot being written: `write` an embedding of `shape` (rows, width) into it, then `commit` or `abandon` it."""

    index: int
    key: bytes
    shape: tuple[int, int]
    dtype: DType
    lease_index: int
    segment: Segment

    def write(self, rows: Rows) -> None:
        """Puts the embedding in its place, wherever it comes from and the slot lies."""
        self.segment.write(self.index, NUMPY_DTYPES[self.dtype], rows)

    @property
    def array(self) -> npt.NDArray[np.generic]:
        """A slot in host memory itself, (rows, width). Must not be written after `commit` or `abandon`."""
        return self.segment.view(self.index, self.shape, NUMPY_DTYPES[self.dtype])


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What a store did so far (hits, misses, evictions) and what it holds now (the rest)."""

    num_hits: int
    num_misses: int
    num_evictions: int
    num_leases_out: int
    num_embeddings: int
    num_slots: int


@dataclass(slots=True)
class _Entry:
    """A committed embedding; unlisted once a newer one took its key."""

    slot: int
    key: bytes
    shape: tuple[int, int]
    dtype: DType
    num_leases: int = 0
    is_listed: bool = True


class EmbeddingStore:
    """Embeddings by content, least recently used ones evicted, leased ones never. Owned by one thread.

    `key` is always 16 bytes (`content_digest`). Each handle carries one lease, which its holder gives back
    (`EmbeddingReader.release`, or `release` here); it ends by itself after `lease_s` seconds of `clock`.
    """

    def __init__(
        self, segment: Segment, fingerprint: bytes, clock: Callable[[], float], lease_s: float = LEASE_S
    ) -> None:
        if len(fingerprint) != DIGEST_BYTES:
            raise ValueError(f"a fingerprint has {DIGEST_BYTES} bytes, this has {len(fingerprint)}")
        self._segment = segment
        self._fingerprint = fingerprint
        self._clock = clock
        self._lease_s = lease_s
        self._leases = LeaseTable(segment)
        self._free = list(range(segment.layout.num_slots - 1, -1, -1))
        self._written: dict[int, Slot] = {}
        self._entries: dict[int, _Entry] = {}
        self._by_key: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._num_hits = self._num_misses = self._num_evictions = 0

    @property
    def counts(self) -> StoreCounts:
        """A snapshot, without a sweep: leases returned since the last one still count as out."""
        return StoreCounts(
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_evictions=self._num_evictions,
            num_leases_out=self._leases.num_out,
            num_embeddings=len(self._by_key),
            num_slots=self._segment.layout.num_slots,
        )

    @property
    def num_leases_held(self) -> int:
        """Leases that are out and were not given back; may be asked by any thread."""
        return self._leases.num_held

    def has_room(self, num_embeddings: int = 1) -> bool:
        """Whether as many `reserve` calls in a row would succeed now. Sweeps."""
        self.sweep(self._clock())
        num_evictable = sum(entry.num_leases == 0 for entry in self._entries.values())
        return min(len(self._free) + num_evictable, self._leases.num_free) >= num_embeddings

    def find(self, key: bytes) -> EmbeddingHandle | None:
        """The embedding of that content under a lease of its own, or None when it must be encoded.

        Raises:
            Overloaded: it is here, but every lease is out.
        """
        entry = self._by_key.get(_checked(key))
        if entry is None:
            self._num_misses += 1
            return None
        self._want_lease()
        self._num_hits += 1
        self._by_key.move_to_end(key)
        return self._lend(entry, self._leases.take())

    def reserve(self, key: bytes, shape: tuple[int, int], dtype: DType) -> Slot:
        """A slot to encode an embedding (rows, width) into, and a lease set aside for it.

        May evict. Nobody sees the slot before `commit`; exactly one of `commit` and `abandon` must follow.

        Raises:
            Overloaded: every slot is leased or being written, or every lease is out.
            ValueError: the embedding is larger than a slot.
        """
        _checked(key)
        self._want_lease()
        index = self._room()
        self._segment.check(index, shape, NUMPY_DTYPES[dtype])  # it may refuse: nothing changed yet
        if index in self._entries:
            self._evict(self._entries[index])
        self._free.remove(index)
        self._segment.generation[index] += 1  # odd: readers of what lay here see it go before its bytes do
        fence()
        slot = Slot(index, key, shape, dtype, self._leases.take(), self._segment)
        self._written[index] = slot
        return slot

    def commit(self, slot: Slot) -> EmbeddingHandle:
        """Make the embedding visible, and lend it once. A newer embedding takes the key of an older one."""
        self._end_writing(slot)
        older = self._by_key.pop(slot.key, None)
        if older is not None:
            older.is_listed = False
            self._free_if_unused(older)
        entry = _Entry(slot.index, slot.key, slot.shape, slot.dtype)
        self._entries[slot.index] = self._by_key[slot.key] = entry
        return self._lend(entry, slot.lease_index)

    def abandon(self, slot: Slot) -> None:
        """Give a reserved slot back without an embedding: encoding it failed."""
        self._end_writing(slot)
        self._leases.put_back(slot.lease_index)
        self._free.append(slot.index)

    def release(self, handle: EmbeddingHandle) -> None:
        """Take back a lease that never left this process, or whose holder is known to be gone; idempotent."""
        slot = self._leases.release(handle.lease_index, handle.lease_id)
        if slot is not None:
            self._unlease(slot)

    def sweep(self, now_s: float) -> int:
        """How many leases ended: given back by their holders, or run out at `now_s` of the store's clock."""
        over = self._leases.sweep(now_s)
        for slot in over:
            self._unlease(slot)
        return len(over)

    def close(self) -> None:
        """Remove the segment: readers get `EmbeddingGone` from now on. Idempotent; the store ends here."""
        self._segment.close()

    def _want_lease(self) -> None:
        """Make sure that a lease can be taken."""
        if self._leases.num_free == 0 and self.sweep(self._clock()) == 0:
            raise Overloaded(
                f"embedding store {self._segment.name}: all {self._segment.layout.num_leases} leases are out"
            )

    def _room(self) -> int:
        """A slot that is free or may be evicted: the least recently used one without a lease."""
        if self._free:
            return self._free[-1]
        self.sweep(self._clock())
        if self._free:  # an unlisted embedding whose last lease just ended
            return self._free[-1]
        for entry in self._by_key.values():
            if entry.num_leases == 0:
                return entry.slot
        num_slots = self._segment.layout.num_slots
        raise Overloaded(
            f"embedding store {self._segment.name} is full: of {num_slots} slots {len(self._entries)} are "
            f"leased and {len(self._written)} are being written, {self._leases.num_out} leases are out"
        )

    def _evict(self, entry: _Entry) -> None:
        """Forget an unleased embedding; its slot is free."""
        self._num_evictions += 1
        del self._by_key[entry.key]
        del self._entries[entry.slot]
        self._free.append(entry.slot)

    def _end_writing(self, slot: Slot) -> None:
        if self._written.get(slot.index) is not slot:
            raise ValueError(f"slot {slot.index} was committed or abandoned already, or is another store's")
        del self._written[slot.index]
        fence()
        self._segment.generation[slot.index] += 1  # even

    def _lend(self, entry: _Entry, lease_index: int) -> EmbeddingHandle:
        """A handle on `entry` with the lease in an entry of the table that was taken for it."""
        lease = self._leases.grant(lease_index, entry.slot, self._clock() + self._lease_s)
        entry.num_leases += 1
        return EmbeddingHandle(
            segment=self._segment.name,
            slot=entry.slot,
            offset=self._segment.layout.slot_offset(entry.slot),
            shape=entry.shape,
            dtype=entry.dtype,
            generation=self._segment.generation[entry.slot],
            lease_index=lease.index,
            lease_id=lease.id,
            digest=entry.key,
            fingerprint=self._fingerprint,
        )

    def _unlease(self, slot: int) -> None:
        entry = self._entries[slot]
        entry.num_leases -= 1
        self._free_if_unused(entry)

    def _free_if_unused(self, entry: _Entry) -> None:
        """Free the slot of an embedding that nobody can find and nobody reads."""
        if not entry.is_listed and entry.num_leases == 0:
            del self._entries[entry.slot]
            self._free.append(entry.slot)


def _checked(key: bytes) -> bytes:
    if len(key) != DIGEST_BYTES:
        raise ValueError(f"a content digest has {DIGEST_BYTES} bytes, this has {len(key)}")
    return key
