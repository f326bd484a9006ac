"""Leases on slots, granted by one process and given back by others without a lock between them.

    owner     granted[i] = 7                     sweep: equal, granted[i] = 0     granted[i] = 9
              ──────┬──────────────────────────────────┬───────────────────────────────┬──────────────▶ time
    holder          └─ reads ─ returned[i] = 7         │                               │
    again, or late                              7 is not 0: nothing             7 is not 9: nothing

Ids never repeat, so a second or a late return names a lease that is over. A holder that dies never returns
its lease; it runs out by the owner's clock, and so can pin a slot no longer than that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from python_backend.transport.segment import Segment, fence


@dataclass(frozen=True, slots=True)
class Lease:
    """A right to read one slot until `expires_s` by the owner's clock."""

    index: int
    id: int
    slot: int
    expires_s: float


class LeaseTable:
    """The owner's side: which leases are out. Owned by the thread that owns the store.

    Trusts its own record, not the shared words: a reader can at most end a lease early.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        # Oldest first: an entry whose lease ran out is granted again as late as possible.
        self._free = deque(range(segment.layout.num_leases))
        self._out: dict[int, Lease] = {}
        self._next_id = 1

    @property
    def num_free(self) -> int:
        """How many more leases can be taken now."""
        return len(self._free)

    @property
    def num_out(self) -> int:
        """How many leases are granted and neither swept nor released."""
        return len(self._out)

    @property
    def num_held(self) -> int:
        """How many of those out were not given back yet; may be asked by any thread."""
        returned = self._segment.returned
        return sum(returned[lease.index] != lease.id for lease in list(self._out.values()))

    def take(self) -> int:
        """Set an entry aside for a later `grant`; there must be a free one."""
        return self._free.popleft()

    def put_back(self, index: int) -> None:
        """Undo `take`: the entry was not granted after all."""
        self._free.append(index)

    def grant(self, index: int, slot: int, expires_s: float) -> Lease:
        """A lease on `slot` in an entry that `take` gave."""
        lease = Lease(index, self._next_id, slot, expires_s)
        self._next_id += 1
        self._out[index] = lease
        self._segment.granted[index] = lease.id
        return lease

    def release(self, index: int, lease_id: int) -> int | None:
        """End a lease from the owner's side; its slot, or None when it was over already."""
        lease = self._out.get(index)
        if lease is None or lease.id != lease_id:
            return None
        self._end(lease)
        return lease.slot

    def sweep(self, now_s: float) -> list[int]:
        """End the leases that were returned or have run out; the slot of each."""
        returned = self._segment.returned
        over = [lease for lease in self._out.values() if returned[lease.index] == lease.id or now_s >= lease.expires_s]
        for lease in over:
            self._end(lease)
        return [lease.slot for lease in over]

    def _end(self, lease: Lease) -> None:
        self._segment.granted[lease.index] = 0
        del self._out[lease.index]
        self._free.append(lease.index)


def is_held(segment: Segment, index: int, lease_id: int) -> bool:
    """Holder's side: whether the lease is still granted and not given back."""
    return segment.granted[index] == lease_id and segment.returned[index] != lease_id


def give_back(segment: Segment, index: int, lease_id: int) -> None:
    """Holder's side: return the lease; nothing happens when it is over already.

    Looks before it stores, because an old id would cover the return of the entry's next lease, and that one
    would then last until it runs out.
    """
    if segment.granted[index] == lease_id:
        fence()  # what was read from the slot was read before the owner may write it again
        segment.returned[index] = lease_id
