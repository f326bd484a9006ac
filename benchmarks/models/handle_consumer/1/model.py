"""`handle_consumer`: copies an embedding that lies behind a handle."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from benchmarks.workload import FINGERPRINT, SHAPE, checksum, take
from python_backend.transport.boot import boot_key, server_pid
from python_backend.transport.handle import EmbeddingHandle
from python_backend.transport.reader import EmbeddingReader


class TritonPythonModel:
    """Keeps the embedding beyond the request in a buffer of its own, and gives the lease back."""

    def initialize(self, args: dict[str, str]) -> None:
        """Makes the buffer and the reader."""
        self._buffer = np.zeros(SHAPE, dtype=np.float16)
        self._boot = boot_key(server_pid())
        self._reader = EmbeddingReader()

    def execute(self, requests: list[Any]) -> list[Any]:
        """One receipt per request."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """Drops the store's map."""
        self._reader.close()

    def _respond(self, request: Any) -> Any:
        row = int(pb_utils.get_input_tensor_by_name(request, "row").as_numpy()[0])
        sealed = bytes(pb_utils.get_input_tensor_by_name(request, "handle").as_numpy()[0])
        handle = EmbeddingHandle.open(sealed, self._boot, FINGERPRINT)
        try:
            work_ns = take(self._reader.read(handle), self._buffer)
        finally:
            self._reader.release(handle)
        receipt = np.array([checksum(self._buffer, row), work_ns])
        return pb_utils.InferenceResponse([pb_utils.Tensor("receipt", receipt)])
