"""`tensor_consumer`: copies an embedding that came as a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from benchmarks.workload import SHAPE, checksum, take


class TritonPythonModel:
    """Keeps the embedding beyond the request, as a decoder must: in a buffer of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Makes the buffer."""
        self._buffer = np.zeros(SHAPE, dtype=np.float16)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One receipt per request."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        row = int(pb_utils.get_input_tensor_by_name(request, "row").as_numpy()[0])
        work_ns = take(pb_utils.get_input_tensor_by_name(request, "embedding").as_numpy(), self._buffer)
        receipt = np.array([checksum(self._buffer, row), work_ns])
        return pb_utils.InferenceResponse([pb_utils.Tensor("receipt", receipt)])
