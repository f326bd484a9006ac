"""`chain`: producer, then consumer, by BLS, with the clock read in between."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from benchmarks.workload import Column

CARRIED = {"tensor": "embedding", "handle": "handle"}  # what each way passes from producer to consumer


class TritonPythonModel:
    """Calls the other models by BLS."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """The records, (chains, ways, columns), of every request."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        indices, rows, names = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("indices", "rows", "ways")
        )
        ways = [name.decode() for name in names]
        records = np.zeros((len(indices), len(ways), len(Column)), dtype=np.int64)
        for place, way in enumerate(ways):  # a block of each: no way finds the other's leavings in the caches
            for chain, (index, row) in enumerate(zip(indices, rows, strict=True)):
                records[chain, place] = _run(way, int(index), int(row))
        return pb_utils.InferenceResponse([pb_utils.Tensor("records", records)])


def _run(way: str, index: int, row: int) -> tuple[int, ...]:
    """One chain; the columns of its record.

    What the producer gave is passed on as it came: a tensor of another name would be one copy more.
    """
    carried = CARRIED[way]
    began = time.perf_counter_ns()
    produced = _call(f"{way}_producer", [pb_utils.Tensor("index", np.array([index]))], [carried, "work_ns"])
    between = time.perf_counter_ns()
    given = [pb_utils.get_output_tensor_by_name(produced, carried), pb_utils.Tensor("row", np.array([row]))]
    consumed = _call(f"{way}_consumer", given, ["receipt"])
    ended = time.perf_counter_ns()
    checksum, consumer_work = pb_utils.get_output_tensor_by_name(consumed, "receipt").as_numpy().tolist()
    producer_work = int(pb_utils.get_output_tensor_by_name(produced, "work_ns").as_numpy()[0])
    return between - began, ended - between, producer_work, consumer_work, checksum


def _call(model: str, inputs: list[Any], wanted: list[str]) -> Any:
    response = pb_utils.InferenceRequest(model_name=model, inputs=inputs, requested_output_names=wanted).exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return response
