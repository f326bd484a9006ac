"""Embeddings in a GPU's memory, on the stand-in driver: real driver calls, two processes, several devices."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from python_backend.errors import EmbeddingGone, HandleRefused, InternalError, Overloaded
from python_backend.transport.boot import BootKey
from python_backend.transport.cuda import CudaDevice, CudaError, CudaMissing, Driver, Stream
from python_backend.transport.device import Copied, DeviceReader, DeviceSegment
from python_backend.transport.handle import EmbeddingHandle
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.reader import EmbeddingReader
from tests.unit.transport.conftest import Peer, end
from tests.unit.transport.device_peer import SHAPE, features

NUM_BYTES = 64
StartOwner = Callable[..., Peer]


class Standin:
    """The stand-in driver of this process, and what it is told to do wrong."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.driver = Driver.load(str(path))

    def fail(self, text: str) -> None:
        self._library.standin_fail(text.encode())

    @property
    def num_blocks(self) -> int:
        return int(self._library.standin_blocks())


@pytest.fixture
def standin(standin_library: Path) -> Iterator[Standin]:
    made = Standin(standin_library)
    made.fail("")
    before = made.num_blocks
    yield made
    made.fail("")
    assert made.num_blocks == before


class Landing:
    """Memory on a device for one embedding, and a reader that copies there."""

    def __init__(self, directory: Path, device: CudaDevice) -> None:
        self.host = EmbeddingReader(directory)
        self.reader = DeviceReader(self.host, device)
        self.stream = device.new_stream()
        self._memory = device.allocate(NUM_BYTES)

    def copy(self, handle: EmbeddingHandle) -> Copied:
        return self.reader.copy(handle, self._memory.address, self.stream)

    def bytes(self) -> np.ndarray:
        values = np.zeros(SHAPE, np.float16)
        self.stream.copy_out(values.ctypes.data, self._memory.address, NUM_BYTES)
        self.stream.synchronize()
        return values

    def close(self) -> None:
        self.reader.close()
        self.host.close()
        self._memory.close()
        self.stream.close()


@pytest.fixture
def land(shared_memory: Path, standin: Standin) -> Iterator[Callable[[int], Landing]]:
    """A landing on the device of a number."""
    made: list[Landing] = []

    def start(index: int) -> Landing:
        made.append(Landing(shared_memory, standin.driver.device(index)))
        return made[-1]

    yield start
    for landing in made:
        landing.close()


@pytest.fixture
def opened(boot: BootKey, fingerprint: bytes) -> Callable[[str], EmbeddingHandle]:
    return lambda sealed: EmbeddingHandle.open(bytes.fromhex(sealed), boot, fingerprint)


Opened = Callable[[str], EmbeddingHandle]
Land = Callable[[int], Landing]


@pytest.mark.parametrize(("index", "path"), [(0, "device"), (1, "peer")])
@pytest.mark.parametrize("how", ["put", "compute"])
def test_an_embedding_comes_whole_from_another_process(
    start_owner: StartOwner, land: Land, opened: Opened, index: int, path: str, how: str
) -> None:
    owner, landing = start_owner(), land(index)

    copied = landing.copy(opened(owner.ask(how, "a", "7")))

    assert (copied.path, copied.num_bytes) == (path, NUM_BYTES)
    assert copied.seconds >= 0
    np.testing.assert_array_equal(landing.bytes(), features(7))


def test_the_segment_is_opened_once_for_all_its_embeddings(
    start_owner: StartOwner, land: Land, opened: Opened, standin: Standin
) -> None:
    owner, landing = start_owner(), land(1)
    for seed in ("1", "2", "3"):
        landing.copy(opened(owner.ask("put", f"image{seed}", seed)))
        np.testing.assert_array_equal(landing.bytes(), features(int(seed)))
        owner.ask("release_all")

    assert standin.num_blocks == 2  # the landing, and the owner's memory


@pytest.mark.parametrize("refusal", ["STANDIN_NO_PEER", "STANDIN_NO_IPC"])
def test_where_memory_cannot_be_opened_embeddings_come_through_the_host(
    shared_memory: Path,
    standin_library: Path,
    start_owner: StartOwner,
    refusal: str,
) -> None:
    owner = start_owner(memory="both")
    sealed = owner.ask("compute", "a", "5")

    told = _read_elsewhere(shared_memory, standin_library, sealed, {refusal: "0-1"})

    assert told == f"staged {hashlib.sha256(features(5).tobytes()).hexdigest()}"


@pytest.mark.parametrize("refusal", ["STANDIN_NO_PEER", "STANDIN_NO_IPC"])
def test_without_host_slots_that_is_an_error_which_says_why(
    shared_memory: Path, standin_library: Path, start_owner: StartOwner, refusal: str
) -> None:
    owner = start_owner(memory="device")
    sealed = owner.ask("put", "a", "5")

    told = _read_elsewhere(shared_memory, standin_library, sealed, {refusal: "0-1"})

    assert told.startswith("InternalError [INTERNAL] the memory of vlm_relay.")
    assert "cannot be opened on cuda:1: cuIpcOpenMemHandle_v2: CUDA_ERROR_" in told
    assert told.endswith("both processes must be in one container or share its IPC namespace")


def test_a_stale_handle_reads_nothing(start_owner: StartOwner, land: Land, opened: Opened) -> None:
    owner, landing = start_owner(), land(1)
    stale = opened(owner.ask("put", "a", "1"))
    landing.copy(stale)
    owner.ask("release_all")
    for content in ("b", "c", "d"):
        owner.ask("put", content, "9")

    with pytest.raises(EmbeddingGone, match="given to a newer one"):
        landing.copy(stale)
    np.testing.assert_array_equal(landing.bytes(), features(1))


class OvertakenStream(Stream):
    """Lets something happen between the check of a handle and its copy."""

    def __init__(self, stream: Stream, happen: Callable[[], object]) -> None:
        super().__init__(stream._device, stream._handle, is_owned=False)
        self._happen = happen

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        self._happen()
        super().copy(to, source, num_bytes)


@pytest.mark.parametrize("event", ["overwritten", "closed"])
def test_a_slot_given_away_during_the_copy_is_noticed(
    start_owner: StartOwner, land: Land, opened: Opened, event: str
) -> None:
    owner, landing = start_owner(), land(1)
    handle = opened(owner.ask("put", "a", "1"))
    landing.copy(handle)
    owner.ask("release_all")

    def happen() -> None:
        if event == "closed":
            owner.ask("close")
        else:
            for content in ("b", "c", "d"):
                owner.ask("put", content, "9")

    landing.stream = OvertakenStream(landing.stream, happen)
    with pytest.raises(EmbeddingGone, match="owner closed it" if event == "closed" else "given to a newer one"):
        landing.copy(handle)


def test_memory_whose_owner_was_killed_is_not_read(start_owner: StartOwner, land: Land, opened: Opened) -> None:
    owner, landing = start_owner(), land(1)
    handle = opened(owner.ask("put", "a", "1"))
    landing.copy(handle)
    owner.kill()

    with pytest.raises(EmbeddingGone, match="its owner died"):
        landing.copy(handle)


def test_an_owner_that_closed_is_gone_at_once(start_owner: StartOwner, land: Land, opened: Opened) -> None:
    owner, landing = start_owner(), land(1)
    handle = opened(owner.ask("put", "a", "1"))
    landing.copy(handle)
    owner.ask("close")

    with pytest.raises(EmbeddingGone, match="its owner closed"):
        landing.copy(handle)


def test_a_copy_that_fails_leaves_the_lease_to_be_given_back(
    start_owner: StartOwner, land: Land, opened: Opened, standin: Standin
) -> None:
    owner, landing = start_owner(memory="both"), land(1)
    handle = opened(owner.ask("put", "a", "1"))
    standin.fail("cuMemcpyDtoDAsync_v2=719")

    with pytest.raises(InternalError, match="cannot be copied: cuMemcpyDtoDAsync_v2: CUDA_ERROR_LAUNCH_FAILED"):
        landing.copy(handle)
    landing.host.release(handle)
    assert not landing.host.holds(handle)


def test_a_decoder_without_a_gpu_says_so(start_owner: StartOwner, shared_memory: Path, opened: Opened) -> None:
    handle = opened(start_owner().ask("put", "a", "1"))

    with pytest.raises(HandleRefused, match="is on a GPU, and this decoder reads host memory"):
        EmbeddingReader(shared_memory).copy(handle, np.zeros(SHAPE, np.float16))


def test_a_decoder_without_a_gpu_reads_the_host_slots(
    start_owner: StartOwner, shared_memory: Path, opened: Opened
) -> None:
    handle = opened(start_owner(memory="both").ask("compute", "a", "3"))
    values = np.zeros(SHAPE, np.float16)

    EmbeddingReader(shared_memory).copy(handle, values)

    np.testing.assert_array_equal(values, features(3))


LAYOUT = SegmentLayout(num_slots=3, slot_bytes=NUM_BYTES, num_leases=6, memory="device")


def test_no_room_on_the_device_says_how_much_there_is(standin: Standin, boot: BootKey, shared_memory: Path) -> None:
    layout = SegmentLayout(num_slots=1000, slot_bytes=1 << 21, num_leases=6, memory="device")

    with pytest.raises(Overloaded, match=r"cuda:0: 2097152000 bytes wanted, 1073741824 free .*fewer slots"):
        DeviceSegment.allocate(boot.id, layout, standin.driver.device(0), shared_memory)


def test_memory_that_cannot_be_exported_needs_host_slots(standin: Standin, boot: BootKey, shared_memory: Path) -> None:
    device = standin.driver.device(0)
    standin.fail("cuIpcGetMemHandle=1")

    with pytest.raises(CudaError, match="cuIpcGetMemHandle"):
        DeviceSegment.allocate(boot.id, LAYOUT, device, shared_memory)
    both = SegmentLayout(3, NUM_BYTES, 6, "both")
    DeviceSegment.allocate(boot.id, both, device, shared_memory).close()


def test_host_slots_that_cannot_be_pinned_work(standin: Standin, boot: BootKey, shared_memory: Path) -> None:
    standin.fail("cuMemHostRegister_v2=1")
    both = SegmentLayout(3, NUM_BYTES, 6, "both")

    segment = DeviceSegment.allocate(boot.id, both, standin.driver.device(0), shared_memory)

    segment.write(0, np.dtype(np.float16), features(2))
    np.testing.assert_array_equal(segment.view(0, SHAPE, np.dtype(np.float16)), features(2))
    segment.close()


def test_no_driver_and_no_gpu_are_one_clear_line(standin_library: Path, tmp_path: Path) -> None:
    with pytest.raises(CudaMissing, match=r"no NVIDIA driver: .*start it with --gpus"):
        Driver.load(str(tmp_path / "libcuda.so.1"))
    with pytest.raises(CudaMissing, match="no device cuda:7; the driver sees 2"):
        Driver.load(str(standin_library)).device(7)


def _read_elsewhere(directory: Path, library: Path, sealed: str, variables: dict[str, str]) -> str:
    """What a reader on cuda:1 in a process of its own, with a driver told by `variables`, has to say."""
    peer = Peer(directory, os.getppid(), "device_reader.py", {"LD_LIBRARY_PATH": str(library.parent), **variables})
    try:
        return peer.ask(sealed)
    finally:
        end(peer)
