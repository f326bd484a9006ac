"""Embeddings in a GPU's memory: segments whose slots lie there, and copies out of them to another GPU.

    encoder   cudaMalloc once ── export once ── graph output ─ copy ─▶ slot          (and ─▶ pinned host slot)
    decoder                      open once per peer ──────────────── slot ─ copy on a side stream ─▶ own memory
                                                                     over NVLink, PCIe, or from the host slot

Accounting (generations, leases) stays in host memory, in the segment's file, as for slots in host memory. A copy is
waited for on the host before generation or lease change hands, so no GPU's order has to be told to another process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from python_backend.errors import EmbeddingGone, InternalError, Overloaded
from python_backend.transport.boot import SHARED_MEMORY
from python_backend.transport.cuda import IPC_HANDLE_BYTES, UUID_BYTES, CudaDevice, CudaError, DeviceMemory, Stream
from python_backend.transport.handle import NUMPY_DTYPES, EmbeddingHandle
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.reader import EmbeddingReader, check_after
from python_backend.transport.segment import Rows, Segment, shape_of

logger = logging.getLogger(__name__)

Route = Literal["device", "peer", "staged"]
WORDS: dict[Route, str] = {
    "device": "from the same GPU",
    "peer": "from a peer's memory",
    "staged": "through pinned host memory",
}


@dataclass(frozen=True, slots=True)
class CudaRows:
    """An embedding (rows, width) that a stream of `device` computes at `address`."""

    device: CudaDevice
    stream: Stream
    address: int
    shape: tuple[int, int]
    dtype: np.dtype[np.generic]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def copy_to(self, address: int) -> None:
        """See `DeviceRows`."""
        self.stream.copy(address, self.address, self.num_bytes)
        self.stream.synchronize()

    def copy_out(self, target: npt.NDArray[np.generic]) -> None:
        """See `DeviceRows`."""
        _check_same(self, target.dtype)
        self.stream.copy_out(target.ctypes.data, self.address, self.num_bytes)
        self.stream.synchronize()


class DeviceSegment(Segment):
    """A segment whose slots lie on a GPU; get it by `allocate`. Written by one thread."""

    _memory: DeviceMemory
    _stream: Stream
    _unpin: Callable[[], None]

    @classmethod
    def allocate(
        cls, boot_id: str, layout: SegmentLayout, device: CudaDevice, directory: Path = SHARED_MEMORY
    ) -> DeviceSegment:
        """A new segment with its slots on `device`; with memory "both", in pinned host memory as well.

        Raises:
            Overloaded: the device or /dev/shm has no room for it; leaves nothing.
            CudaError: the device's memory cannot be exported, and there are no host slots instead.
        """
        memory = _take(device, layout)
        try:
            segment = cls.create(boot_id, layout, directory, _export(memory, layout))
        except BaseException:
            memory.close()
            raise
        segment._memory = memory
        segment._stream = device.new_stream()
        segment._unpin = _pin(segment, device, is_read_only=False)
        return segment

    def write(self, slot: int, dtype: np.dtype[np.generic], rows: Rows) -> None:
        """See `Segment`."""
        self.check(slot, shape_of(rows), dtype)
        address = self._memory.address + slot * self.layout.slot_stride_bytes
        if isinstance(rows, np.ndarray):
            converted = np.ascontiguousarray(rows, dtype)
            self._stream.copy_in(address, converted.ctypes.data, converted.nbytes)
            self._stream.synchronize()
        else:
            _check_same(rows, dtype)
            rows.copy_to(address)
        if self.layout.memory == "both":
            super().write(slot, dtype, rows)

    def close(self) -> None:
        """See `Segment`; the device's memory goes too, so readers must not copy any more."""
        is_first = self._file is not None
        super().close()
        if is_first:
            self._unpin()
            self._stream.close()
            self._memory.close()


@dataclass(frozen=True, slots=True)
class Copied:
    """How an embedding came, and how long the copy took by the device's clock."""

    path: Route
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Source:
    """A peer's segment as this process reaches it; `memory` None is through its host slots."""

    segment: Segment
    path: Route
    memory: DeviceMemory | None
    unpin: Callable[[], None]

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
        self.unpin()


class DeviceReader:
    """Copies embeddings by handle into memory of one device. Any thread may call it; copies take turns."""

    def __init__(self, reader: EmbeddingReader, device: CudaDevice) -> None:
        self._reader = reader
        self._device = device
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}
        self._start, self._end = device.new_event(), device.new_event()

    def copy(self, handle: EmbeddingHandle, address: int, stream: Stream) -> Copied:
        """Copies the embedding to `address` on the reader's device; returns when it is there.

        The host waits and the device does not: kernels of other streams run on meanwhile.

        Raises:
            EmbeddingGone: the slot was given to a newer embedding, before or during the copy, or the owner has gone.
            HandleRefused: the handle does not fit its segment.
            InternalError: the encoder's memory cannot be opened here, and it keeps none in host memory.
        """
        segment = self._reader.locate(handle)
        with self._lock:
            source = self._source_of(segment)
            if source.memory is not None and not segment.has_owner():
                # What becomes of exported memory whose owner died is undefined: it is not read.
                raise EmbeddingGone(f"embedding segment {segment.name} is gone: its owner died")
            try:
                seconds = self._run(source, handle, address, stream)
            except CudaError as error:
                raise InternalError(f"embedding {handle.digest.hex()} cannot be copied: {error}") from error
        if not segment.is_open:
            raise EmbeddingGone(f"embedding segment {segment.name} is gone: its owner closed it")
        check_after(segment, handle)
        return Copied(source.path, handle.num_bytes, seconds)

    def close(self) -> None:
        """Closes what was opened."""
        with self._lock:
            for source in self._sources.values():
                source.close()
            self._sources.clear()

    def _run(self, source: _Source, handle: EmbeddingHandle, address: int, stream: Stream) -> float:
        layout = source.segment.layout
        stream.record(self._start)
        if source.memory is not None:
            stream.copy(address, source.memory.address + handle.slot * layout.slot_stride_bytes, handle.num_bytes)
        else:
            view = source.segment.view(handle.slot, handle.shape, NUMPY_DTYPES[handle.dtype])
            stream.copy_in(address, view.ctypes.data, handle.num_bytes)
        stream.record(self._end)
        self._end.synchronize()
        return self._end.seconds_since(self._start)

    def _source_of(self, segment: Segment) -> _Source:
        source = self._sources.get(segment.name)
        if source is None or source.segment is not segment:
            gone = [name for name, each in self._sources.items() if not each.segment.is_linked]
            for name in {*gone, segment.name} & self._sources.keys():
                self._sources.pop(name).close()
            source = self._sources[segment.name] = self._open(segment)
            logger.info("embeddings of %s come %s", segment.name, WORDS[source.path])
        return source

    def _open(self, segment: Segment) -> _Source:
        if segment.layout.memory != "host":
            ipc_handle = segment.export[:IPC_HANDLE_BYTES]
            uuid = segment.export[IPC_HANDLE_BYTES : IPC_HANDLE_BYTES + UUID_BYTES]
            try:
                memory = self._device.open(ipc_handle, segment.layout.slots_bytes)
            except CudaError as error:
                if segment.layout.memory == "device":
                    raise InternalError(
                        f"the memory of {segment.name} cannot be opened on cuda:{self._device.index}: {error}; both "
                        "processes must be in one container or share its IPC namespace"
                    ) from error
                logger.warning("%s cannot be opened, its host slots are read instead: %s", segment.name, error)
            else:
                path: Route = "device" if uuid == self._device.uuid else "peer"
                return _Source(segment, path, memory, lambda: None)
        return _Source(segment, "staged", None, _pin(segment, self._device, is_read_only=True))


def _take(device: CudaDevice, layout: SegmentLayout) -> DeviceMemory:
    try:
        return device.allocate(layout.slots_bytes)
    except CudaError as error:
        free_bytes, _ = device.memory_bytes()
        raise Overloaded(
            f"no room for an embedding segment on cuda:{device.index}: {layout.slots_bytes} bytes wanted, {free_bytes} "
            f"free ({error}); use fewer slots (encode.slots)"
        ) from error


def _export(memory: DeviceMemory, layout: SegmentLayout) -> bytes:
    """What a reader needs; zeros, which nobody can open, where host slots stand in."""
    try:
        return memory.export() + memory.device.uuid
    except CudaError as error:
        if layout.memory != "both":
            raise
        logger.warning("memory of cuda:%d cannot be exported: %s", memory.device.index, error)
        return b""


def _pin(segment: Segment, device: CudaDevice, is_read_only: bool) -> Callable[[], None]:
    """Pins the segment's host slots, if there are any; what it gives undoes it, while the segment still is mapped."""
    if segment.layout.memory == "device":
        return lambda: None
    first = segment.view(0, (1, segment.layout.slot_bytes), np.dtype(np.uint8))
    try:
        return device.pin(first.ctypes.data, segment.layout.slots_bytes, is_read_only)
    except CudaError as error:  # slower, and correct
        logger.warning("the host slots of %s cannot be pinned: %s", segment.name, error)
        return lambda: None


def _check_same(rows: object, dtype: np.dtype[np.generic]) -> None:
    given = getattr(rows, "dtype", None)
    if given != dtype:
        raise ValueError(f"features of {given} on a device cannot become {dtype}; set encode.dtype to it")
