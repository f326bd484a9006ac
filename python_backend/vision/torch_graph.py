"""The encoder by torch: with CUDA graphs on a GPU, plainly on a CPU. For GPUs without TensorRT."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from python_backend.checkpoint import CheckpointFacts
from python_backend.transport.cuda import CudaDevice, Driver, Stream
from python_backend.transport.device import CudaRows
from python_backend.transport.segment import Rows
from python_backend.vision.buckets import BucketedEncoder, Pixels, buckets_up_to
from python_backend.vision.tower import load_encoder

NUM_WARM_UPS = 3  # libraries pick kernels and take workspaces at their first calls, which must not be recorded


class TorchProgram:
    """The modules at one batch size; see `Program`."""

    def __init__(
        self, module: torch.nn.Module, shape: tuple[int, int, int, int], dtype: torch.dtype, lane: Lane
    ) -> None:
        self._module = module
        self._lane = lane
        self._pixels = torch.zeros(shape, dtype=dtype, device=lane.device)
        self._features = torch.empty(0)

    def load(self, pixels: Pixels) -> None:
        """See `Program`."""
        with self._lane.entered():
            self._pixels[: len(pixels)].copy_(torch.from_numpy(pixels))

    @torch.inference_mode()
    def run(self) -> None:
        """See `Program`."""
        with self._lane.entered():
            self._features = self._module(self._pixels)

    @torch.inference_mode()
    def record(self) -> Callable[[], None]:
        """See `Program`."""
        for _ in range(NUM_WARM_UPS):
            self.run()
        torch.cuda.synchronize(self._lane.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._lane.torch_stream):
            features = self._module(self._pixels)

        def replay() -> None:
            with self._lane.entered():
                graph.replay()
            self._features = features

        return replay

    def rows(self, num_images: int) -> list[Rows]:
        """See `Program`."""
        return [self._lane.rows(self._features[index]) for index in range(num_images)]

    def close(self) -> None:
        """See `Program`."""
        self._features = self._pixels = torch.empty(0)


class Lane:
    """Where the programs run: a device, and on a GPU one stream for all."""

    def __init__(self, device: torch.device, cuda: CudaDevice | None) -> None:
        self.device = device
        self._cuda = cuda
        self.torch_stream = torch.cuda.Stream(device) if cuda is not None else None  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[object]:
        """Makes the stream current."""
        if self.torch_stream is None:
            return nullcontext()
        context: AbstractContextManager[object] = torch.cuda.stream(self.torch_stream)
        return context

    def rows(self, features: torch.Tensor) -> Rows:
        """One image's features, (tokens, width), for the store."""
        if self._cuda is None or self.torch_stream is None:
            array: Rows = features.numpy()
            return array
        rows, width = features.shape
        dtype = np.dtype(str(features.dtype).removeprefix("torch."))
        stream = Stream.of(self._cuda, self.torch_stream.cuda_stream)
        return CudaRows(self._cuda, stream, features.data_ptr(), (rows, width), dtype)


def rows_of_dlpack(capsule: object, cuda: CudaDevice, stream: Stream) -> list[Rows]:
    """The features (images, tokens, width) that another library computed on a GPU and has finished."""
    features = torch.from_dlpack(capsule)  # type: ignore[attr-defined]
    dtype = np.dtype(str(features.dtype).removeprefix("torch."))
    _, tokens, width = features.shape
    return [CudaRows(cuda, stream, each.data_ptr(), (tokens, width), dtype) for each in features]


def make_torch_encoder(
    facts: CheckpointFacts, device: str, dtype: str, uses_graphs: bool, max_batch: int, num_threads: int
) -> BucketedEncoder:
    """The encoder on "cpu" or "cuda:0", its features in `dtype`.

    Raises:
        CudaMissing: there is no such GPU.
        CheckpointRefused: its tensors are not all there.
    """
    on = torch.device(device)
    cuda = Driver.load().device(on.index) if on.type == "cuda" else None
    if cuda is None:
        torch.set_num_threads(num_threads)
    module, lane = load_encoder(facts.path, getattr(torch, dtype), on), Lane(on, cuda)
    size = facts.image_size
    return BucketedEncoder(
        lambda batch: TorchProgram(module, (batch, 3, size, size), getattr(torch, dtype), lane),
        size,
        buckets_up_to(max_batch),
        uses_graphs and cuda is not None,
    )
