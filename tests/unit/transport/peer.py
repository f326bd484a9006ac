"""A second process for the tests: an owner or a reader of embeddings, moved by lines on its input."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from python_backend.errors import RelayError
from python_backend.transport.boot import BootKey, boot_key
from python_backend.transport.handle import EmbeddingHandle, content_digest, fingerprint_of
from python_backend.transport.janitor import remove_orphans
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.reader import EmbeddingReader
from python_backend.transport.segment import Segment
from python_backend.transport.store import EmbeddingStore


class _Peer:
    def __init__(self, directory: Path, boot: BootKey) -> None:
        self._directory = directory
        self._boot = boot
        self._fingerprint = fingerprint_of("a model", "its preprocessing")
        self._reader = EmbeddingReader(directory)
        self._store: EmbeddingStore | None = None
        self._views: list[object] = []

    def boot(self) -> str:
        return f"{self._boot.id} {hashlib.sha256(self._boot.key).hexdigest()}"

    def create(self) -> str:
        segment = Segment.create(self._boot.id, SegmentLayout(3, 64, 6), self._directory)
        self._store = EmbeddingStore(segment, self._fingerprint, lambda: 0.0)
        return segment.name

    def put(self, content: str, seed: str) -> str:
        assert self._store is not None
        slot = self._store.reserve(content_digest(content.encode(), self._boot), (4, 8), "float16")
        slot.array[...] = np.random.default_rng(int(seed)).standard_normal((4, 8)).astype(np.float16)
        return self._store.commit(slot).seal(self._boot).hex()

    def attach(self, name: str) -> str:
        self._views.append(Segment.attach(name, self._directory))
        return "attached"

    def read(self, sealed: str) -> str:
        self._views.append(self._reader.read(self._open(sealed)))
        return hashlib.sha256(self._reader.read(self._open(sealed)).tobytes()).hexdigest()

    def release(self, sealed: str) -> str:
        self._reader.release(self._open(sealed))
        return "released"

    def sweep(self) -> str:
        return ",".join(remove_orphans(self._directory)) or "nothing"

    def close(self) -> str:
        assert self._store is not None
        self._store.close()
        return "closed"

    def _open(self, sealed: str) -> EmbeddingHandle:
        return EmbeddingHandle.open(bytes.fromhex(sealed), self._boot, self._fingerprint)


def main() -> None:
    directory = Path(sys.argv[1])
    peer = _Peer(directory, boot_key(int(sys.argv[2]), directory))
    for line in sys.stdin:
        name, *words = line.split()
        command: Callable[..., str] = getattr(peer, name)
        try:
            print(command(*words), flush=True)
        except (RelayError, ValueError, OSError) as error:
            print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main()
