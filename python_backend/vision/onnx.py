"""The encoder by ONNX Runtime, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from python_backend.transport.segment import Rows

MAX_BATCH = 64  # as the graph was exported


class OnnxEncoder:
    """An exported encoder, loaded."""

    def __init__(self, path: Path, num_threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        # Spinning threads would take the decoder's cores between images.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        is_half = self._session.get_inputs()[0].type == "tensor(float16)"
        self._dtype = np.float16 if is_half else np.float32

    @property
    def max_batch(self) -> int:
        """See `Encoder`."""
        return MAX_BATCH

    def encode(self, pixels: npt.NDArray[np.float32]) -> list[Rows]:
        """See `Encoder`; in the graph's own dtype."""
        return list(self._session.run(["features"], {"pixel_values": pixels.astype(self._dtype, copy=False)})[0])

    def close(self) -> None:
        """See `Encoder`."""
