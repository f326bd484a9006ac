"""The encoder as a native model of the same Triton, `clip_engine`, asked by BLS."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from python_backend.errors import InternalError
from python_backend.models.adapter import Site
from python_backend.transport.cuda import Driver
from python_backend.transport.placing import gpu_index
from python_backend.transport.segment import Rows
from scheduler.engine import engine_name

logger = logging.getLogger(__name__)


class EngineCall:
    """An `Encoder` whose features another model computes; on a GPU they stay there. For `execute` only."""

    def __init__(self, site: Site) -> None:
        self._model = engine_name(site.replica)
        self._max_batch = site.plan.encode.max_batch
        self._shape = (site.facts.image_tokens, site.facts.width)
        index = gpu_index(site.replica.device)
        self._device = None if index is None else Driver.load().device(index)
        self._stream = None if self._device is None else self._device.new_stream()
        self._response: Any = None  # holds the memory of the last features

    @property
    def max_batch(self) -> int:
        """See `Encoder`."""
        return self._max_batch

    def encode(self, pixels: npt.NDArray[np.float32]) -> list[Rows]:
        """See `Encoder`.

        Raises:
            InternalError: the model answered with an error, or with features of another shape.
        """
        self._response = None
        where = {}
        if self._device is not None:
            where["preferred_memory"] = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, self._device.index)
        request = pb_utils.InferenceRequest(
            model_name=self._model,
            requested_output_names=["features"],
            inputs=[pb_utils.Tensor("pixel_values", pixels.astype(np.float16))],
            **where,
        )
        self._response = request.exec()
        if self._response.has_error():
            raise InternalError(f"{self._model}: {self._response.error().message()}")
        rows = self._rows(pb_utils.get_output_tensor_by_name(self._response, "features"))
        if len(rows) != len(pixels) or any(each.shape != self._shape for each in rows):
            raise InternalError(f"{self._model}: features of another shape than {self._shape} per image")
        return rows

    def close(self) -> None:
        """See `Encoder`."""
        self._response = None

    def _rows(self, tensor: Any) -> list[Rows]:
        if tensor.is_cpu() or self._device is None or self._stream is None:
            return list(tensor.as_numpy())
        from python_backend.vision.torch_graph import rows_of_dlpack  # torch: for its view of a foreign tensor

        return rows_of_dlpack(tensor.to_dlpack(), self._device, self._stream)
