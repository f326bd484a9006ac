"""TensorRT as far as the encoder's runtime uses it, computing on the stand-in driver's memory.

An "engine" is a few bytes of text. Its features of an image are the first numbers of its pixels: copies, so that
graphs of the stand-in record them. `faults` makes it go wrong in ways seen in the field.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from python_backend.transport.cuda import CudaDevice, Stream

ITEM_BYTES = 2  # float16


class Context:
    def __init__(self, trt: FakeTensorRt) -> None:
        self._trt = trt
        self._addresses: dict[str, int] = {}
        self._shape: tuple[int, ...] = ()

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert name == "pixel_values"
        self._shape = shape
        return shape[0] <= self._trt.largest_batch

    def set_tensor_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        trt = self._trt
        trt.num_runs += 1
        batch, *image = self._shape
        image_bytes = image[0] * image[1] * image[2] * ITEM_BYTES
        size = trt.feature_items * ITEM_BYTES
        # The fault: what a graph records is not what a plain run does (it reads the first image for all).
        is_stale = "stale graph" in trt.faults and trt.is_recording(stream)
        for index in range(batch):
            source = self._addresses["pixel_values"] + (0 if is_stale else index * image_bytes) + trt.offset_bytes
            target = self._addresses["features"] + index * size
            Stream.of(trt.device, stream).copy(target, source if not is_stale else target, size)
        return "no run" not in trt.faults


class FakeTensorRt:
    """The module."""

    __version__ = "10.9.0"
    Logger = SimpleNamespace(WARNING=2)

    def __init__(self, device: CudaDevice, feature_items: int, *faults: str) -> None:
        self.device = device
        self.feature_items = feature_items
        self.faults = faults
        self.largest_batch = 8
        self.offset_bytes = 0
        self.num_runs = 0
        self._recorded: set[int] = set()
        Fake = self

        class Runtime:
            def __init__(self, log: object) -> None:
                pass

            def deserialize_cuda_engine(self, data: bytes) -> Any:
                if data != b"engine":
                    return None
                return SimpleNamespace(create_execution_context=lambda: Context(Fake))

        self.Runtime = Runtime
        self.Logger = lambda level: None  # type: ignore[assignment,misc]
        self.Logger.WARNING = 2  # type: ignore[attr-defined]

    def is_recording(self, stream: int) -> bool:
        """Every second run of a stream is the recorded one: the runtime runs once before it records."""
        is_second = stream in self._recorded and self.num_runs > 3
        self._recorded.add(stream)
        return is_second
