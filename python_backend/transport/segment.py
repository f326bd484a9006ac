"""Slots for embeddings in POSIX shared memory: made by one process, read by others, unlinked by its maker.

`layout.py` draws what lies where. Plain `os.open` and `mmap`: `multiprocessing.shared_memory` fails inside
Triton's stub, and its resource tracker would unlink segments of others.

    creator    create ── flock held, for life ─────────────────────── close: is open = 0, unlink
    reader            attach ── maps ──── reads ──── drops its maps
    janitor                                      gets the flock only when the creator is dead: unlinks
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from python_backend.errors import EmbeddingGone, Overloaded
from python_backend.transport.boot import SHARED_MEMORY, refuse_foreign
from python_backend.transport.layout import (
    EXPORT_BYTES,
    EXPORT_OFFSET,
    IS_OPEN,
    NUM_FACTS,
    WORD_BYTES,
    SegmentLayout,
    boot_of_segment,
    segment_name,
)

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT)
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_fence_lock = threading.Lock()


def fence() -> None:
    """Keep the stores and loads before the call before those after it, as other processes see them.

    x86 keeps stores (and loads) in order by itself, ARM does not; Python has no barrier, but a lock released
    and taken again is one on both.
    """
    with _fence_lock:
        pass
    with _fence_lock:
        pass


class DeviceRows(Protocol):
    """An embedding (rows, width) in a device's memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Of its numbers."""

    def copy_out(self, target: npt.NDArray[np.generic]) -> None:
        """Into host memory of the same shape and dtype, once it is computed."""

    def copy_to(self, address: int) -> None:
        """Into memory of the same device, once it is computed; returns when it is there."""


Rows = npt.NDArray[np.generic] | DeviceRows


def shape_of(rows: Rows) -> tuple[int, int]:
    """Rows and width of an embedding."""
    num_rows, width = rows.shape
    return num_rows, width


class Segment:
    """One mapped segment; get it by `create` or `attach`.

    `generation` (one word per slot) and `granted` (one per lease) are written by the creator only, `returned`
    (one per lease) by whoever gives a lease back; each word is read and stored whole. A segment that a reader
    drops unmaps itself once the last array that `view` gave is gone too.
    """

    def __init__(self, path: Path, file: int, layout: SegmentLayout, is_creator: bool) -> None:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        rights = both if is_creator else mmap.PROT_READ
        # Pages are there already (fallocate); mapping them now spares each first touch of a slot its faults.
        shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.path = path
        self.layout = layout
        self._control = mmap.mmap(file, layout.control_bytes, shared, rights, offset=0)
        self._returned = mmap.mmap(file, layout.returned_bytes, shared, both, offset=layout.control_bytes)
        slots_bytes = layout.total_bytes - layout.slots_offset
        self._slots = mmap.mmap(file, slots_bytes, shared, rights, offset=layout.slots_offset) if slots_bytes else None
        words = memoryview(self._control).cast("Q")
        self._facts = words[:NUM_FACTS]
        self.generation = words[layout.generation_word : layout.granted_word]
        self.granted = words[layout.granted_word : layout.granted_word + layout.num_leases]
        self.returned = memoryview(self._returned).cast("Q")[: layout.num_leases]
        self._file = file if is_creator else None
        self._creator_pid = os.getpid() if is_creator else None

    @classmethod
    def create(cls, boot_id: str, layout: SegmentLayout, directory: Path = SHARED_MEMORY, export: bytes = b"") -> Self:
        """A new segment under a fresh random name in `directory`, mode 0600, all words and slots zero.

        `export` tells readers how to open slots on a device (see `layout`). Host memory is taken now: a full
        /dev/shm is an error here and never a SIGBUS later. Holds an exclusive flock until `close` or death; a
        forked child shares it, a spawned one does not.

        Raises:
            Overloaded: the file system has no room for it, or its limits forbid the size; leaves no file.
        """
        path, file = _create_locked(boot_id, directory)
        try:
            os.fchmod(file, 0o600)
            _allocate(file, layout.total_bytes, directory)
            os.pwrite(file, export, EXPORT_OFFSET)
            os.pwrite(file, struct.pack(f"={NUM_FACTS}Q", *layout.facts()), 0)
            return cls(path, file, layout, is_creator=True)
        except BaseException:
            os.unlink(path)
            os.close(file)
            raise

    @classmethod
    def attach(cls, name: str, directory: Path = SHARED_MEMORY) -> Self:
        """The segment of that name, for reading: slots and control words read only, `returned` writable.

        Raises:
            EmbeddingGone: it was closed, or its creator is dead.
            ValueError: not the name of a segment, or what lies there is not one.
            PermissionError: it belongs to another user or is open to others.
        """
        if boot_of_segment(name) is None:
            raise ValueError(f"not the name of an embedding segment: {name[:80]!r}")
        path = directory / name
        try:
            file = os.open(path, _FLAGS)
        except FileNotFoundError:
            raise EmbeddingGone(f"embedding segment {name} is gone: its owner closed or died") from None
        try:
            size_bytes = refuse_foreign(file, path).st_size
            if try_lock(file, fcntl.LOCK_SH):
                raise EmbeddingGone(f"embedding segment {name} is gone: its owner died")
            return cls(path, file, _read_layout(file, name, size_bytes), is_creator=False)
        finally:
            os.close(file)  # the maps keep their own descriptors

    @property
    def name(self) -> str:
        """What a handle calls it; a file name, never a path."""
        return self.path.name

    @property
    def export(self) -> bytes:
        """What the creator gave as `export`, filled up with zeros to `EXPORT_BYTES`."""
        return self._control[EXPORT_OFFSET : EXPORT_OFFSET + EXPORT_BYTES]

    @property
    def is_open(self) -> bool:
        """False once its creator has closed it. A creator that was killed leaves it True."""
        return self._facts[IS_OPEN] == 1

    @property
    def is_linked(self) -> bool:
        """Whether its file still has its name: neither the creator nor a janitor has removed it."""
        return self.path.exists()

    def has_owner(self) -> bool:
        """Whether the creator lives and has not closed it; asks the kernel, so it is for rare or dear things."""
        try:
            file = os.open(self.path, _FLAGS)
        except OSError:
            return False
        try:
            return not try_lock(file, fcntl.LOCK_SH)
        finally:
            os.close(file)

    def view(self, slot: int, shape: tuple[int, int], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """The first bytes of a slot as an array (rows, width): writable for the creator, else read only.

        In place: shows whatever the slot holds later, too.

        Raises:
            ValueError: no such slot, or the array would be longer than a slot.
        """
        self.check(slot, shape, dtype)
        rows, width = shape
        if self._slots is None:
            raise ValueError(f"the slots of {self.name} are on a device, not in host memory")
        offset = slot * self.layout.slot_stride_bytes
        return np.frombuffer(self._slots, dtype=dtype, count=rows * width, offset=offset).reshape(shape)

    def check(self, slot: int, shape: tuple[int, int], dtype: np.dtype[np.generic]) -> None:
        """Whether a slot of that number can hold an array (rows, width).

        Raises:
            ValueError: no such slot, or the array would be longer than a slot.
        """
        rows, width = shape
        wanted_bytes = rows * width * dtype.itemsize
        if not 0 <= slot < self.layout.num_slots or rows < 1 or width < 1:
            raise ValueError(f"slot {slot} with shape {shape}: {self.name} has {self.layout.num_slots} slots")
        if wanted_bytes > self.layout.slot_bytes:
            raise ValueError(
                f"an embedding of {rows} x {width} {dtype} takes {wanted_bytes} bytes, "
                f"a slot of {self.name} has {self.layout.slot_bytes}"
            )

    def write(self, slot: int, dtype: np.dtype[np.generic], rows: Rows) -> None:
        """Puts an embedding (rows, width) into a slot, converted to `dtype`; returns when it is there."""
        target = self.view(slot, shape_of(rows), dtype)
        if isinstance(rows, np.ndarray):
            target[...] = rows
        else:
            rows.copy_out(target)

    def close(self) -> None:
        """Remove the segment's name and tell its readers; idempotent. For the creator only.

        Arrays that `view` gave stay valid: memory goes when the last map of it does. In a forked child of the
        creator it only lets go of the child's descriptor.
        """
        if self._file is None:
            return
        if self._creator_pid == os.getpid():
            self._facts[IS_OPEN] = 0
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.close(self._file)
        self._file = None


def try_lock(file: int, kind: int) -> bool:
    """Whether the flock of that kind (fcntl.LOCK_EX or LOCK_SH) could be taken at once."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_layout(file: int, name: str, size_bytes: int) -> SegmentLayout:
    """The layout that an open file of that size tells; refuses what is no segment or one closed meanwhile."""
    facts = os.pread(file, NUM_FACTS * WORD_BYTES, 0).ljust(NUM_FACTS * WORD_BYTES, b"\0")
    words = struct.unpack(f"={NUM_FACTS}Q", facts)
    try:
        layout = SegmentLayout.from_facts(words, size_bytes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if words[IS_OPEN] != 1:
        raise EmbeddingGone(f"embedding segment {name} is gone: its owner closed it")
    return layout


def _create_locked(boot_id: str, directory: Path) -> tuple[Path, int]:
    """An empty file under a fresh name, its exclusive flock held."""
    while True:
        path = directory / segment_name(boot_id)
        file = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        # A janitor may come between open and flock, and take the file for an orphan: then begin again.
        if try_lock(file, fcntl.LOCK_EX) and os.fstat(file).st_nlink == 1:
            return path, file
        os.close(file)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _allocate(file: int, wanted_bytes: int, directory: Path) -> None:
    """Give the open file its memory, all of it, now."""
    try:
        os.posix_fallocate(file, 0, wanted_bytes)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        room = os.statvfs(directory)
        raise Overloaded(
            f"no room for an embedding segment in {directory}: {wanted_bytes} bytes wanted, "
            f"{room.f_bavail * room.f_frsize} free ({error.strerror}); use fewer slots, or give the "
            "container more (--shm-size, or an emptyDir with medium Memory)"
        ) from None
