"""The encoder by ONNX Runtime, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime


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

    def encode(self, pixels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Features (batch, tokens, width) of pixel values (batch, 3, height, width)."""
        features: npt.NDArray[np.float32] = self._session.run(["features"], {"pixel_values": pixels})[0]
        return features
