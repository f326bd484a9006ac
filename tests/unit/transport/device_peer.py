"""A second process with a GPU of the stand-in driver: an owner of embeddings there, moved by lines on its input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from python_backend.errors import RelayError
from python_backend.transport.boot import BootKey, boot_key
from python_backend.transport.cuda import CudaError, Driver
from python_backend.transport.device import CudaRows, DeviceSegment
from python_backend.transport.handle import content_digest, fingerprint_of
from python_backend.transport.layout import Memory, SegmentLayout
from python_backend.transport.store import EmbeddingStore

SHAPE = (4, 8)


def features(seed: int) -> np.ndarray:
    """What `put` and `compute` store."""
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float16)


class _Peer:
    def __init__(self, directory: Path, boot: BootKey) -> None:
        self._directory = directory
        self._boot = boot
        self._driver = Driver.load()

    def create(self, index: str, memory: Memory) -> str:
        self._device = self._driver.device(int(index))
        layout = SegmentLayout(3, 64, 6, memory)
        segment = DeviceSegment.allocate(self._boot.id, layout, self._device, self._directory)
        self._store = EmbeddingStore(segment, fingerprint_of("a model", "its preprocessing"), lambda: 0.0)
        return segment.name

    def put(self, content: str, seed: str) -> str:
        """Features from host memory."""
        slot = self._store.reserve(content_digest(content.encode(), self._boot), SHAPE, "float16")
        slot.write(features(int(seed)))
        return self._store.commit(slot).seal(self._boot).hex()

    def compute(self, content: str, seed: str) -> str:
        """Features that a stream still computes when they are written to the slot."""
        values = features(int(seed))
        output = self._device.allocate(values.nbytes)
        stream = self._device.new_stream()
        stream.copy_in(output.address, values.ctypes.data, values.nbytes)
        slot = self._store.reserve(content_digest(content.encode(), self._boot), SHAPE, "float16")
        slot.write(CudaRows(self._device, stream, output.address, SHAPE, values.dtype))
        stream.close()
        output.close()
        return self._store.commit(slot).seal(self._boot).hex()

    def release_all(self) -> str:
        return str(self._store.sweep(1e9))

    def sweep_returned(self) -> str:
        return str(self._store.sweep(0.0))

    def close(self) -> str:
        self._store.close()
        return "closed"


def main() -> None:
    directory = Path(sys.argv[1])
    peer = _Peer(directory, boot_key(int(sys.argv[2]), directory))
    for line in sys.stdin:
        name, *words = line.split()
        command: Callable[..., str] = getattr(peer, name)
        try:
            print(command(*words), flush=True)
        except (RelayError, ValueError, OSError, CudaError) as error:
            print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main()
