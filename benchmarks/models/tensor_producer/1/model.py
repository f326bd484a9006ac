"""`tensor_producer`: an embedding as a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from benchmarks.workload import SHAPE, features, write


class TritonPythonModel:
    """Gives embeddings it has at hand; Triton copies them out."""

    def initialize(self, args: dict[str, str]) -> None:
        """Makes what is written, and the array it is written into."""
        self._features = features()
        self._array = np.zeros(SHAPE, dtype=np.float16)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One embedding per request."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        index = int(pb_utils.get_input_tensor_by_name(request, "index").as_numpy()[0])
        work = pb_utils.Tensor("work_ns", np.array([write(self._features, index, self._array)]))
        embedding = pb_utils.Tensor("embedding", self._array)
        return pb_utils.InferenceResponse([embedding, work])
