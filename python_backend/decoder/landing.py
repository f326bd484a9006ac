"""Where embeddings land: a copy of each in the decoder's own memory, taken before its prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from python_backend.transport.cuda import CudaDevice, Driver, Stream
from python_backend.transport.device import Copied, DeviceReader
from python_backend.transport.handle import NUMPY_DTYPES, EmbeddingHandle
from python_backend.transport.reader import EmbeddingReader


class Landing(Protocol):
    """Copies embeddings to where the decoder computes. Any thread may call it."""

    def land(self, handle: EmbeddingHandle) -> torch.Tensor:
        """The embedding, (rows, width), in the store's dtype on the decoder's device; the caller's own.

        Raises:
            EmbeddingGone: the slot was given to a newer embedding, or the owner has gone.
            HandleRefused: the handle does not fit its segment.
        """

    def release(self, handle: EmbeddingHandle) -> None:
        """Gives the handle's lease back; idempotent."""

    def close(self) -> None:
        """Lets go of all segments."""


class HostLanding:
    """For a decoder on a CPU."""

    def __init__(self, reader: EmbeddingReader) -> None:
        self._reader = reader

    def land(self, handle: EmbeddingHandle) -> torch.Tensor:
        """See `Landing`."""
        features = torch.empty(handle.shape, dtype=getattr(torch, handle.dtype))
        out = features.view(torch.uint16) if handle.dtype == "bfloat16" else features
        array = out.numpy()
        assert array.dtype == NUMPY_DTYPES[handle.dtype]
        self._reader.copy(handle, array)
        return features

    def release(self, handle: EmbeddingHandle) -> None:
        """See `Landing`."""
        self._reader.release(handle)

    def close(self) -> None:
        """See `Landing`."""
        self._reader.close()


class DeviceMemorySource(Protocol):
    """Memory of one GPU for embeddings, and the stream on which they are copied into it."""

    device: CudaDevice
    stream: Stream

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Memory for one embedding, and its address on the device."""


class TorchMemory:
    """torch's memory of a GPU, copied into on a side stream while the default stream decodes."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._torch_device = torch.device("cuda", device.index)
        self._side = torch.cuda.Stream(self._torch_device)  # type: ignore[no-untyped-call]
        self.stream = Stream.of(device, self._side.cuda_stream)

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """See `DeviceMemorySource`."""
        # From the side stream's pool: what the decoder gives back is written again only when its stream has read it.
        with torch.cuda.stream(self._side):
            features = torch.empty(shape, dtype=dtype, device=self._torch_device)
        features.record_stream(torch.cuda.default_stream(self._torch_device))
        return features, features.data_ptr()


class DeviceLanding:
    """For a decoder on a GPU: peer memory, the same GPU's, or pinned host memory, as the segment allows."""

    def __init__(
        self, reader: EmbeddingReader, memory: DeviceMemorySource, note: Callable[[Copied], None] = lambda copied: None
    ) -> None:
        self._host = reader
        self._memory = memory
        self._reader = DeviceReader(reader, memory.device)
        self._note = note

    def land(self, handle: EmbeddingHandle) -> torch.Tensor:
        """See `Landing`. The caller waits, the GPU's other streams do not."""
        features, address = self._memory.allocate(handle.shape, getattr(torch, handle.dtype))
        self._note(self._reader.copy(handle, address, self._memory.stream))
        return features

    def release(self, handle: EmbeddingHandle) -> None:
        """See `Landing`."""
        self._host.release(handle)

    def close(self) -> None:
        """See `Landing`."""
        self._reader.close()
        self._host.close()


def make_landing(device: str, note: Callable[[Copied], None]) -> Landing:
    """The landing of a decoder on `device`, "cpu" or "cuda:0"; `note` is told of every copy on a GPU.

    Raises:
        CudaMissing: there is no such GPU.
    """
    reader = EmbeddingReader()
    if device == "cpu":
        return HostLanding(reader)
    return DeviceLanding(reader, TorchMemory(Driver.load().device(int(device.removeprefix("cuda:")))), note)
