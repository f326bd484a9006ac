"""Large images by way of this machine's memory, instead of inside the message: for a client beside its server.

    client ── image ─▶ a piece of the region ◀── reads ── server, which maps the region once
       └── request: region, offset, size ─────────▶

One region per client, made and registered when the first large image comes. The server must have been started with
the same key (`VLM_RELAY_SHM_KEY`): who may register memory may register anybody's, so nobody can without it.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import shared_memory

from client.errors import InvalidRequest, RelayClientError, from_status

KEY_VARIABLE = "VLM_RELAY_SHM_KEY"  # the key in the environment, of the server and of the commands here
REGION_BYTES = 64 << 20
LEAST_BYTES = 256 << 10  # below this the message is as fast
HEADER = "triton-grpc-protocol-vlm-relay-shm-key"  # Triton's prefix, and the name in launcher/triton.py
_ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a region that holds one request's images, as Triton lays out BYTES tensors."""

    region: str
    offset: int
    num_bytes: int


def key_from(variables: Mapping[str, str]) -> str:
    """The key in these environment variables.

    Raises:
        InvalidRequest: there is none.
    """
    key = variables.get(KEY_VARIABLE, "")
    if not key:
        raise InvalidRequest(f"--shared-memory needs the server's {KEY_VARIABLE} in the environment")
    return key


class SharedMemory:
    """The region of one client, its free places, and whether the server knows it. May be shared by threads."""

    def __init__(self, key: str, region_bytes: int = REGION_BYTES, least_bytes: int = LEAST_BYTES) -> None:
        self._key = key
        self._region_bytes = region_bytes
        self._least_bytes = least_bytes
        self._name = f"vlm_relay_client_{os.getpid()}_{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._handle: shared_memory.SharedMemoryRegion | None = None
        self._free = [(0, region_bytes)]  # offset and size, in order, no two side by side
        self.is_registered = False

    def place(self, images: Sequence[bytes]) -> Piece | None:
        """A copy of the images for the server to read; None when they are small, or there is no room just now.

        Give it back with `free` when the request has ended.
        """
        num_bytes = sum(4 + len(image) for image in images)
        if num_bytes < self._least_bytes:
            return None
        with self._lock:
            if self._handle is None and not self._create():
                return None
            offset = self._take(_aligned(num_bytes))
        if offset is None:
            return None
        at = offset
        for image in images:
            parts = [np.frombuffer(each, np.uint8) for each in (struct.pack("<I", len(image)), image)]
            shared_memory.set_shared_memory_region(self._handle, parts, at)
            at += 4 + len(image)
        return Piece(self._name, offset, num_bytes)

    def free(self, piece: Piece) -> None:
        """Gives the place to others."""
        with self._lock:
            places = sorted([*self._free, (piece.offset, _aligned(piece.num_bytes))])
            self._free = [places[0]]
            for offset, size in places[1:]:
                before, before_size = self._free[-1]
                if before + before_size == offset:
                    self._free[-1] = (before, before_size + size)
                else:
                    self._free.append((offset, size))

    @property
    def num_free_bytes(self) -> int:
        """What is not lent."""
        with self._lock:
            return sum(size for _, size in self._free)

    def registration(self) -> service_pb2.SystemSharedMemoryRegisterRequest:
        """What tells the server of the region."""
        return service_pb2.SystemSharedMemoryRegisterRequest(
            name=self._name, key=f"/{self._name}", offset=0, byte_size=self._region_bytes
        )

    def farewell(self) -> service_pb2.SystemSharedMemoryUnregisterRequest:
        """What makes the server forget it."""
        return service_pb2.SystemSharedMemoryUnregisterRequest(name=self._name)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The key, as gRPC metadata of both."""
        return ((HEADER, self._key),)

    def note_refusal(self, status: str, details: str, address: str) -> None:
        """Judges a registration that failed; nothing when another stream of this client was faster.

        Raises:
            RelayClientError: the server does not take the region.
        """
        if "already in manager" not in details:
            raise _refusal(status, details, address) from None

    def close(self) -> None:
        """Removes the region."""
        with self._lock:
            handle, self._handle = self._handle, None
            self.is_registered = False
            if handle is not None:
                shared_memory.destroy_shared_memory_region(handle)

    def _create(self) -> bool:
        """Whether the memory is there. The caller holds the lock."""
        handle = shared_memory.create_shared_memory_region(self._name, self._name, self._region_bytes, create_only=True)
        try:
            file = os.open(f"/dev/shm/{self._name}", os.O_RDWR)
            try:
                os.posix_fallocate(file, 0, self._region_bytes)  # or writing to a full /dev/shm would kill us
            finally:
                os.close(file)
        except OSError:
            shared_memory.destroy_shared_memory_region(handle)
            return False
        self._handle = handle
        return True

    def _take(self, size: int) -> int | None:
        """The offset of the first place that is large enough. The caller holds the lock."""
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        return None


def _refusal(status: str, details: str, address: str) -> RelayClientError:
    if "restricted" in details:
        return InvalidRequest(
            f"the server at {address} takes no images from shared memory with this key; it must be started with "
            f"the same {KEY_VARIABLE}"
        )
    if "shared memory" in details:
        return InvalidRequest(f"the server at {address} cannot open this machine's shared memory: {details[:200]}")
    return from_status(status, details, address, has_answered=False)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
