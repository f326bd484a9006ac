"""Embeddings landing in a decoder's memory: on a CPU, and on a GPU of the stand-in driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from python_backend.decoder.landing import DeviceLanding, HostLanding, make_landing
from python_backend.errors import EmbeddingGone
from python_backend.transport.boot import BootKey
from python_backend.transport.cuda import CudaDevice, CudaMissing, Driver
from python_backend.transport.device import Copied
from python_backend.transport.handle import EmbeddingHandle
from python_backend.transport.reader import EmbeddingReader
from tests.unit.transport.device_peer import SHAPE, features

if TYPE_CHECKING:
    from tests.unit.transport.conftest import Peer


class StandinMemory:
    """Memory of the stand-in's GPU behind tensors that only stand for it."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.stream = device.new_stream()
        self.memory = device.allocate(64)

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        return torch.empty(shape, dtype=dtype, device="meta"), self.memory.address

    def bytes(self) -> np.ndarray:
        values = np.zeros(SHAPE, np.float16)
        self.stream.copy_out(values.ctypes.data, self.memory.address, values.nbytes)
        self.stream.synchronize()
        return values


@pytest.mark.parametrize(("index", "route"), [(0, "device"), (1, "peer")])
def test_an_embedding_lands_on_the_decoders_gpu_and_its_lease_goes_back(
    start_owner: Callable[..., Peer],
    standin_library: Path,
    shared_memory: Path,
    boot: BootKey,
    fingerprint: bytes,
    index: int,
    route: str,
) -> None:
    owner = start_owner()
    handle = EmbeddingHandle.open(bytes.fromhex(owner.ask("compute", "a", "4")), boot, fingerprint)
    memory = StandinMemory(Driver.load(str(standin_library)).device(index))
    noted: list[Copied] = []
    landing = DeviceLanding(EmbeddingReader(shared_memory), memory, noted.append)

    tensor = landing.land(handle)
    landing.release(handle)

    assert (tuple(tensor.shape), tensor.dtype) == (SHAPE, torch.float16)
    np.testing.assert_array_equal(memory.bytes(), features(4))
    assert [(copied.path, copied.num_bytes) for copied in noted] == [(route, 64)]
    assert owner.ask("sweep_returned") == "1"
    landing.close()
    memory.memory.close()


def test_on_a_cpu_it_lands_in_host_memory(
    start_owner: Callable[..., Peer], shared_memory: Path, boot: BootKey, fingerprint: bytes
) -> None:
    handle = EmbeddingHandle.open(bytes.fromhex(start_owner(memory="both").ask("put", "a", "6")), boot, fingerprint)
    landing = HostLanding(EmbeddingReader(shared_memory))

    np.testing.assert_array_equal(landing.land(handle).numpy(), features(6))

    landing.release(handle)
    landing.close()


def test_a_killed_encoders_memory_does_not_land(
    start_owner: Callable[..., Peer], standin_library: Path, shared_memory: Path, boot: BootKey, fingerprint: bytes
) -> None:
    owner = start_owner()
    handle = EmbeddingHandle.open(bytes.fromhex(owner.ask("put", "a", "4")), boot, fingerprint)
    memory = StandinMemory(Driver.load(str(standin_library)).device(1))
    landing = DeviceLanding(EmbeddingReader(shared_memory), memory)
    landing.land(handle)
    owner.kill()

    with pytest.raises(EmbeddingGone):
        landing.land(handle)
    landing.close()
    memory.memory.close()


def test_a_decoder_on_a_gpu_that_is_not_there_says_so() -> None:
    with pytest.raises(CudaMissing, match="no NVIDIA driver"):
        make_landing("cuda:0", print)
