"""The vision encoder as its stage sees it, and which of the runtimes serves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from python_backend.checkpoint import CheckpointFacts
from python_backend.transport.segment import Rows
from scheduler.plan import Plan, Replica

logger = logging.getLogger(__name__)


class Encoder(Protocol):
    """A loaded vision encoder. Used by one thread."""

    @property
    def max_batch(self) -> int:
        """The most images that `encode` takes at once."""

    def encode(self, pixels: npt.NDArray[np.float32]) -> Sequence[Rows]:
        """The features of each image, (tokens, width), of pixel values (images, 3, height, width).

        In host memory or on the encoder's GPU; valid until the next call.
        """

    def close(self) -> None:
        """Frees what it holds."""


def make_encoder(plan: Plan, replica: Replica, facts: CheckpointFacts, artifacts: Path) -> Encoder:
    """The encoder that a plan wants on a replica's device; builds what is not there yet.

    Raises:
        CudaMissing, EngineRefused: what it needs is not on this machine.
        CheckpointRefused, ExportFailed: the checkpoint's encoder cannot be served.
    """
    encode = plan.encode
    if encode.runtime == "torch":
        from python_backend.vision.torch_graph import make_torch_encoder  # torch: only where it computes

        device, dtype = replica.device, encode.dtype
        return make_torch_encoder(facts, device, dtype, encode.graphs, encode.max_batch, encode.threads)
    if encode.runtime == "tensorrt":
        from python_backend.vision.tensorrt import make_tensorrt_encoder

        return make_tensorrt_encoder(facts, artifacts, replica.device, encode.graphs, encode.max_batch)
    from python_backend.vision.onnx import OnnxEncoder

    return OnnxEncoder(current_graph(facts, artifacts), encode.threads)


def current_graph(facts: CheckpointFacts, artifacts: Path) -> Path:
    """The float32 graph of a checkpoint, exported if it is not there."""
    from python_backend.vision.export import export, is_current, onnx_file

    if not is_current(facts, artifacts):
        logger.info("no current encoder in %s: exporting it", artifacts)
        export(facts, artifacts)
    return artifacts / onnx_file()
