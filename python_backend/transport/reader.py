"""The consumer's side: from a handle to the embedding behind it, in another process's segment."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from python_backend.errors import EmbeddingGone, HandleRefused
from python_backend.transport.boot import SHARED_MEMORY
from python_backend.transport.handle import NUMPY_DTYPES, EmbeddingHandle
from python_backend.transport.leases import give_back, is_held
from python_backend.transport.segment import Segment, fence

MAX_SEGMENTS = 32  # more encoders than a node has; the least recently used map is dropped


class EmbeddingReader:
    """Reads embeddings by handle; each peer's segment is attached once. Any thread may call it.

    Handles must come from `EmbeddingHandle.open`, which refuses forged ones. An owner that closed is gone at
    once; one that was killed leaves what lies in an attached segment readable, and cannot be attached anew.
    """

    def __init__(self, directory: Path = SHARED_MEMORY, max_segments: int = MAX_SEGMENTS) -> None:
        self._directory = directory
        self._max_segments = max_segments
        self._lock = threading.Lock()
        self._segments: OrderedDict[str, Segment] = OrderedDict()  # least recently used first

    @property
    def num_segments(self) -> int:
        """How many segments are attached."""
        return len(self._segments)

    def read(self, handle: EmbeddingHandle) -> npt.NDArray[np.generic]:
        """The embedding (rows, width) in place, read only; bfloat16 as uint16. Valid until `release`.

        Needs the lease that came with the handle: without one the owner may write the slot at any time.

        Raises:
            EmbeddingGone: the slot was given to a newer embedding, the lease is over, or the owner has gone.
            HandleRefused: the handle does not fit its segment.
        """
        segment = self.locate(handle)
        array = _view(segment, handle)
        if not is_held(segment, handle.lease_index, handle.lease_id):
            raise EmbeddingGone(f"the lease on embedding {handle.digest.hex()} is over: returned or run out")
        return array

    def copy(self, handle: EmbeddingHandle, out: npt.NDArray[np.generic]) -> None:
        """Copy the embedding into `out` (rows, width), of the handle's dtype (bfloat16: uint16).

        Works without a lease, too, as long as the slot was not given away; `out` is garbage if it raises.

        Raises:
            EmbeddingGone: the slot was given to a newer embedding, before or during the copy, or the owner
                has gone.
            HandleRefused: the handle does not fit its segment.
            ValueError: `out` has another shape or dtype.
        """
        if out.shape != handle.shape or out.dtype != NUMPY_DTYPES[handle.dtype]:
            raise ValueError(f"{handle.dtype} {handle.shape} does not go into {out.dtype} {out.shape}")
        segment = self.locate(handle)
        np.copyto(out, _view(segment, handle))
        check_after(segment, handle)

    def locate(self, handle: EmbeddingHandle) -> Segment:
        """The attached segment whose slot holds the embedding at this moment.

        Raises:
            EmbeddingGone: the slot was given to a newer embedding, or the owner has gone.
            HandleRefused: the handle does not fit its segment.
        """
        segment = self._segment_of(handle)
        _check_fit(segment, handle)
        _check_generation(segment, handle)
        return segment

    def holds(self, handle: EmbeddingHandle) -> bool:
        """Whether what `read` gave for this handle is still that embedding; for a check after use."""
        try:
            self.read(handle)
        except EmbeddingGone:
            return False
        return True

    def release(self, handle: EmbeddingHandle) -> None:
        """Give the handle's lease back; nothing happens when it is over, or the owner gone. Idempotent."""
        try:
            segment = self._segment_of(handle)
        except EmbeddingGone:
            return
        if handle.lease_index < segment.layout.num_leases:
            give_back(segment, handle.lease_index, handle.lease_id)

    def close(self) -> None:
        """Drop all segments; arrays that `read` gave stay valid memory. A later call attaches again."""
        with self._lock:
            self._segments.clear()

    def _segment_of(self, handle: EmbeddingHandle) -> Segment:
        """The attached segment of a handle; drops it when its owner has closed it."""
        with self._lock:
            segment = self._segments.get(handle.segment)
            if segment is not None:
                self._segments.move_to_end(handle.segment)
        if segment is None:
            segment = self._attach(handle.segment)
        if not segment.is_open:
            with self._lock:
                self._segments.pop(handle.segment, None)
            raise EmbeddingGone(f"embedding segment {handle.segment} is gone: its owner closed it")
        return segment

    def _attach(self, name: str) -> Segment:
        """Attach a peer's segment, and drop those that have lost their file or are too many."""
        try:
            fresh = Segment.attach(name, self._directory)
        except (ValueError, PermissionError) as error:
            raise HandleRefused(str(error)) from error
        with self._lock:
            for other in [other for other, segment in self._segments.items() if not segment.is_linked]:
                del self._segments[other]
            segment = self._segments.setdefault(name, fresh)
            while len(self._segments) > self._max_segments:
                self._segments.popitem(last=False)
        return segment


def check_after(segment: Segment, handle: EmbeddingHandle) -> None:
    """That what was copied out of a located slot until now is whole.

    Raises:
        EmbeddingGone: the slot was given to a newer embedding meanwhile.
    """
    fence()
    _check_generation(segment, handle)


def _view(segment: Segment, handle: EmbeddingHandle) -> npt.NDArray[np.generic]:
    if segment.layout.memory == "device":
        raise HandleRefused(f"embedding {handle.digest.hex()} is on a GPU, and this decoder reads host memory")
    return segment.view(handle.slot, handle.shape, NUMPY_DTYPES[handle.dtype])


def _check_fit(segment: Segment, handle: EmbeddingHandle) -> None:
    layout = segment.layout
    fits = (
        handle.slot < layout.num_slots
        and handle.offset == layout.slot_offset(handle.slot)
        and 0 < handle.num_bytes <= layout.slot_bytes
        and handle.lease_index < layout.num_leases
    )
    if not fits:
        raise HandleRefused(
            f"embedding handle out of bounds: slot {handle.slot} at {handle.offset}, {handle.num_bytes} "
            f"bytes, lease {handle.lease_index}; {segment.name} has {layout.num_slots} slots of "
            f"{layout.slot_bytes} bytes and {layout.num_leases} leases"
        )


def _check_generation(segment: Segment, handle: EmbeddingHandle) -> None:
    generation = segment.generation[handle.slot]
    if generation != handle.generation:
        raise EmbeddingGone(
            f"embedding {handle.digest.hex()} is gone: slot {handle.slot} of {segment.name} was given to a "
            f"newer one (generation {handle.generation}, now {generation})"
        )
