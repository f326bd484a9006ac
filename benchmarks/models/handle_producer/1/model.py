"""`handle_producer`: an embedding in the store, and its handle."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from benchmarks.workload import EMBEDDING_BYTES, FINGERPRINT, NUM_SLOTS, SHAPE, features, write
from python_backend.transport.boot import boot_key, server_pid
from python_backend.transport.handle import content_digest
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.segment import Segment
from python_backend.transport.store import EmbeddingStore

LEASES_PER_SLOT = 8


class TritonPythonModel:
    """Writes embeddings it has at hand into an embedding store, never the same content twice."""

    def initialize(self, args: dict[str, str]) -> None:
        """Makes what is written, and the store it is written into."""
        self._features = features()
        self._boot = boot_key(server_pid())
        layout = SegmentLayout(NUM_SLOTS, EMBEDDING_BYTES, LEASES_PER_SLOT * NUM_SLOTS)
        self._store = EmbeddingStore(Segment.create(self._boot.id, layout), FINGERPRINT, time.monotonic)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One handle per request."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Removes the store."""
        self._store.close()

    def _respond(self, request: Any) -> Any:
        index = int(pb_utils.get_input_tensor_by_name(request, "index").as_numpy()[0])
        slot = self._store.reserve(content_digest(index.to_bytes(8, "little"), self._boot), SHAPE, "float16")
        work = pb_utils.Tensor("work_ns", np.array([write(self._features, index, slot.array)]))
        sealed = self._store.commit(slot).seal(self._boot)
        handle = pb_utils.Tensor("handle", np.array([sealed], dtype=np.object_))
        return pb_utils.InferenceResponse([handle, work])
