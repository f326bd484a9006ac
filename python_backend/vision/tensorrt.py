"""The encoder by a TensorRT engine in this process, one execution context and CUDA graph per batch size."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from python_backend.checkpoint import CheckpointFacts
from python_backend.transport.cuda import CudaDevice, Driver, Graph
from python_backend.transport.device import CudaRows
from python_backend.transport.segment import Rows
from python_backend.vision.buckets import BucketedEncoder, Pixels, buckets_up_to, to_host
from python_backend.vision.engine_build import EngineRefused, Progress, ensure_engine, import_tensorrt
from python_backend.vision.runtime import current_graph

logger = logging.getLogger(__name__)

HALF = np.dtype(np.float16)
TOLERANCE = 2e-2  # of the largest feature, against ONNX Runtime in float32


class EngineProgram:
    """An engine at one batch size; see `Program`. Its buffers never move, since a graph keeps their addresses."""

    def __init__(self, context: Any, shape: tuple[int, int, int, int], features: tuple[int, int], device: CudaDevice):
        if not context.set_input_shape("pixel_values", shape):
            raise EngineRefused(f"the engine takes no batch of {shape[0]}; build it anew (vlm-relay build --force)")
        self._device = device
        self._stream = device.new_stream()
        self._context = context
        self._shape = features
        self._host = np.zeros(shape, HALF)
        self._unpin = device.pin(self._host.ctypes.data, self._host.nbytes, is_read_only=False)
        self._pixels = device.allocate(self._host.nbytes)
        self._features = device.allocate(shape[0] * math.prod(features) * HALF.itemsize)
        self._graphs: list[Graph] = []
        self.load(np.zeros(shape, np.float32))
        context.set_tensor_address("pixel_values", self._pixels.address)
        context.set_tensor_address("features", self._features.address)

    def load(self, pixels: Pixels) -> None:
        """See `Program`."""
        part = self._host[: len(pixels)]
        part[...] = pixels
        self._stream.copy_in(self._pixels.address, part.ctypes.data, part.nbytes)
        self._stream.synchronize()  # the host buffer is free again

    def run(self) -> None:
        """See `Program`."""
        self._device.make_current()
        if not self._context.execute_async_v3(self._stream.handle):
            raise EngineRefused("TensorRT could not enqueue the encoder; its log says why")

    def record(self) -> Callable[[], None]:
        """See `Program`."""
        self.run()  # TensorRT prepares a shape at its first run, which must not be recorded
        self._stream.synchronize()
        graph = self._stream.record_graph(self.run)
        self._graphs.append(graph)
        return lambda: self._stream.launch(graph)

    def rows(self, num_images: int) -> list[Rows]:
        """See `Program`."""
        size = math.prod(self._shape) * HALF.itemsize
        addresses = [self._features.address + index * size for index in range(num_images)]
        return [CudaRows(self._device, self._stream, address, self._shape, HALF) for address in addresses]

    def close(self) -> None:
        """See `Program`."""
        self._stream.synchronize()
        for graph in self._graphs:
            graph.close()
        self._pixels.close()
        self._features.close()
        self._stream.close()
        self._unpin()


def make_tensorrt_encoder(
    facts: CheckpointFacts, artifacts: Path, device: str, uses_graphs: bool, max_batch: int
) -> BucketedEncoder:
    """The encoder on "cuda:0" by an engine that is built if need be, its features in float16.

    Raises:
        CudaMissing: there is no such GPU.
        EngineRefused: no TensorRT here, or it does not take or load the engine.
    """
    on = Driver.load().device(int(device.removeprefix("cuda:")))
    trt = import_tensorrt()
    path = build_engine(trt, facts, artifacts, on, _log_progress)
    encoder = load_engine(trt, path.read_bytes(), on, facts, uses_graphs, max_batch)
    logger.info("%s loaded on %s", path.name, on.name)
    return encoder


def build_engine(
    trt: Any, facts: CheckpointFacts, artifacts: Path, device: CudaDevice, progress: Progress, is_forced: bool = False
) -> Path:
    """The file of a current engine, built and compared with ONNX Runtime if need be.

    Raises:
        EngineRefused: TensorRT does not take the graph, or its features differ.
    """

    def check(data: bytes) -> None:
        encoder = load_engine(trt, data, device, facts, uses_graphs=False, max_batch=2)
        try:
            logger.info("engine verified: features off by %.1e of their scale", verify(encoder, facts, artifacts))
        finally:
            encoder.close()

    return ensure_engine(trt, facts, artifacts, device, progress, check, is_forced)


def load_engine(
    trt: Any, data: bytes, device: CudaDevice, facts: CheckpointFacts, uses_graphs: bool, max_batch: int
) -> BucketedEncoder:
    """An engine's bytes as an encoder.

    Raises:
        EngineRefused: TensorRT does not load it.
    """
    device.make_current()
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise EngineRefused(
            f"TensorRT {trt.__version__} does not load the engine; build it anew (vlm-relay build --force)"
        )
    size, features = facts.image_size, (facts.image_tokens, facts.width)

    def make(batch: int) -> EngineProgram:
        context = engine.create_execution_context()
        if context is None:
            raise EngineRefused(f"no memory on cuda:{device.index} for the encoder at a batch of {batch}")
        return EngineProgram(context, (batch, 3, size, size), features, device)

    return BucketedEncoder(make, size, buckets_up_to(max_batch), uses_graphs)


def verify(encoder: BucketedEncoder, facts: CheckpointFacts, artifacts: Path) -> float:
    """How far the encoder's features are from ONNX Runtime's in float32, as a share of the largest one.

    Raises:
        EngineRefused: further than float16 explains.
    """
    from python_backend.vision.onnx import OnnxEncoder

    shape = (2, 3, facts.image_size, facts.image_size)
    pixels = np.random.default_rng(3).standard_normal(shape, dtype=np.float32)
    reference = OnnxEncoder(current_graph(facts, artifacts), num_threads=4)
    wanted = np.stack([to_host(rows) for rows in reference.encode(pixels)])
    found = np.stack([to_host(rows) for rows in encoder.encode(pixels)])
    error = float(abs(found - wanted).max()) / (float(abs(wanted).max()) or 1.0)
    if not error <= TOLERANCE:
        raise EngineRefused(f"the engine's features are off by {error:.1e} of their scale; allowed: {TOLERANCE:g}")
    return error


def _log_progress(phase: str, share: float) -> None:
    if share == 1.0:
        logger.info("engine: %s done", phase)
