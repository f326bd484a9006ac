"""NVIDIA's driver library as the transport needs it: device memory, its IPC handles, copies, streams, events.

By ctypes on libcuda itself: what is needed is thirty calls, a test can put another library in its place, and the
encoder's process does not need torch for it. Every call that works on a device makes that device's primary context
current first, the one that torch and TensorRT use too, so any thread may call anything here.

Device numbers are CUDA's; `CUDA_DEVICE_ORDER=PCI_BUS_ID` makes them nvidia-smi's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
IPC_HANDLE_BYTES = 64
UUID_BYTES = 16
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_DEFAULT_EVENT = 0
_THREAD_LOCAL = 1  # other threads may allocate while one records
_PORTABLE = 1
_READ_ONLY = 8
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability


class CudaMissing(RuntimeError):
    """No driver library, or no GPU; the message says what to do."""


class CudaError(RuntimeError):
    """A call of the driver failed."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code


class _IpcHandle(ctypes.Structure):
    """By value in a call, as the driver wants it."""

    _fields_ = (("data", ctypes.c_byte * IPC_HANDLE_BYTES),)


class Driver:
    """The loaded library. Get the one of this process by `load`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._call("cuInit", ctypes.c_uint(0))

    @classmethod
    def load(cls, path: str = LIBRARY) -> Driver:
        """The driver at `path`, ready.

        Raises:
            CudaMissing: no such library, or no device that it could drive.
        """
        try:
            driver = cls(ctypes.CDLL(path))
            num_devices = driver.num_devices
        except OSError as error:
            raise CudaMissing(f"no NVIDIA driver: {error}; in a container, start it with --gpus") from error
        except CudaError as error:
            raise CudaMissing(f"the NVIDIA driver cannot start: {error}") from error
        if num_devices == 0:
            raise CudaMissing("the NVIDIA driver sees no GPU; is CUDA_VISIBLE_DEVICES empty?")
        return driver

    @property
    def num_devices(self) -> int:
        """How many devices this process sees."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device(self, index: int) -> CudaDevice:
        """The device of that number, its primary context taken for the life of the process.

        Raises:
            CudaMissing: there is none of that number.
        """
        if not 0 <= index < self.num_devices:
            raise CudaMissing(f"no device cuda:{index}; the driver sees {self.num_devices}")
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index))
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        return CudaDevice(self, index, handle, context)

    def call(self, context: ctypes.c_void_p, name: str, *arguments: Any) -> None:
        """A call in a context. Raises `CudaError`."""
        self._call("cuCtxSetCurrent", context)
        self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise CudaError(name, code, (text.value or b"unknown").decode())

    def text(self, name: str, handle: ctypes.c_int) -> str:
        """A device's text, of at most 255 bytes."""
        buffer = ctypes.create_string_buffer(256)
        self._call(name, buffer, ctypes.c_int(len(buffer)), handle)
        return buffer.value.decode(errors="replace")

    def integer(self, attribute: int, handle: ctypes.c_int) -> int:
        """An attribute of a device."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), handle)
        return value.value

    def uuid(self, handle: ctypes.c_int) -> bytes:
        """The 16 bytes that name a device in every process, however it numbers them."""
        buffer = ctypes.create_string_buffer(UUID_BYTES)
        self._call("cuDeviceGetUuid_v2", buffer, handle)
        return buffer.raw

    def can_access_peer(self, one: ctypes.c_int, other: ctypes.c_int) -> bool:
        """Whether the first device can reach the second's memory."""
        can = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(can), one, other)
        return can.value == 1


class CudaDevice:
    """One GPU and its primary context."""

    def __init__(self, driver: Driver, index: int, handle: ctypes.c_int, context: ctypes.c_void_p) -> None:
        self._driver = driver
        self._handle = handle
        self._context = context
        self.index = index
        self.name = driver.text("cuDeviceGetName", handle)
        self.uuid = driver.uuid(handle)

    @property
    def compute_capability(self) -> str:
        """As "9.0"."""
        return f"{self._driver.integer(_MAJOR, self._handle)}.{self._driver.integer(_MINOR, self._handle)}"

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def can_access(self, other: CudaDevice) -> bool:
        """Whether this device can read the other's memory directly."""
        return self.index == other.index or self._driver.can_access_peer(self._handle, other._handle)

    def call(self, name: str, *arguments: Any) -> None:
        """A call in this device's context. Raises `CudaError`."""
        self._driver.call(self._context, name, *arguments)

    def make_current(self) -> None:
        """Makes its context that of the calling thread, for libraries that expect one."""
        self.call("cuCtxSetCurrent", self._context)

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Plain memory, which can be exported; `CudaError` if there is not so much."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return DeviceMemory(self, address.value, num_bytes, "cuMemFree_v2")

    def open(self, ipc_handle: bytes, num_bytes: int) -> DeviceMemory:
        """Another process's memory, whichever device it is on. Raises `CudaError`."""
        handle = _IpcHandle.from_buffer_copy(ipc_handle)
        address = ctypes.c_uint64()
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return DeviceMemory(self, address.value, num_bytes, "cuIpcCloseMemHandle")

    def new_stream(self) -> Stream:
        """A stream that waits for no other."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return Stream(self, stream)

    def new_event(self) -> Event:
        """An event with a time."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_DEFAULT_EVENT))
        return Event(self, event)

    def pin(self, address: int, num_bytes: int, is_read_only: bool) -> Callable[[], None]:
        """Pins host memory, so that copies run at full speed; what it gives undoes it. Raises `CudaError`."""
        flags = _PORTABLE | (_READ_ONLY if is_read_only else 0)
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(flags))
        return lambda: self.call("cuMemHostUnregister", ctypes.c_void_p(address))


class DeviceMemory:
    """A piece of a device's memory, this process's own or opened from another; `close` gives it back."""

    def __init__(self, device: CudaDevice, address: int, num_bytes: int, undo: str) -> None:
        self.device = device
        self.address = address
        self.num_bytes = num_bytes
        self._undo: str | None = undo

    def export(self) -> bytes:
        """The handle by which other processes open it, `IPC_HANDLE_BYTES` long. Raises `CudaError`."""
        handle = _IpcHandle()
        self.device.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def close(self) -> None:
        """Frees it, or closes what was opened; idempotent."""
        if self._undo is not None:
            undo, self._undo = self._undo, None
            self.device.call(undo, ctypes.c_uint64(self.address))


class Stream:
    """Work of one device in order. `handle` may be another library's stream: see `of`."""

    def __init__(self, device: CudaDevice, handle: ctypes.c_void_p, is_owned: bool = True) -> None:
        self._device = device
        self._handle = handle
        self._is_owned = is_owned

    @classmethod
    def of(cls, device: CudaDevice, handle: int) -> Stream:
        """A stream that somebody else made and will destroy, such as torch's `cuda_stream`."""
        return cls(device, ctypes.c_void_p(handle), is_owned=False)

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Device memory to device memory that this device can reach. Returns at once."""
        addresses = ctypes.c_uint64(to), ctypes.c_uint64(source)
        self._device.call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(num_bytes), self._handle)

    def copy_in(self, to: int, host: int, num_bytes: int) -> None:
        """Host memory to the device. Returns at once; the memory must stay."""
        addresses = ctypes.c_uint64(to), ctypes.c_void_p(host)
        self._device.call("cuMemcpyHtoDAsync_v2", *addresses, ctypes.c_size_t(num_bytes), self._handle)

    def copy_out(self, host: int, source: int, num_bytes: int) -> None:
        """The device's memory to the host. Returns at once; the memory must stay."""
        addresses = ctypes.c_void_p(host), ctypes.c_uint64(source)
        self._device.call("cuMemcpyDtoHAsync_v2", *addresses, ctypes.c_size_t(num_bytes), self._handle)

    def record(self, event: Event) -> None:
        """Marks this place in the stream."""
        self._device.call("cuEventRecord", event.handle, self._handle)

    def wait_for(self, event: Event) -> None:
        """What is put into the stream from now on begins after the event."""
        self._device.call("cuStreamWaitEvent", self._handle, event.handle, ctypes.c_uint(0))

    def record_graph(self, work: Callable[[], None]) -> Graph:
        """What `work` puts into this stream, recorded and not done. Raises `CudaError`."""
        self._device.call("cuStreamBeginCapture_v2", self._handle, ctypes.c_int(_THREAD_LOCAL))
        graph, program = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            work()
        finally:
            self._device.call("cuStreamEndCapture", self._handle, ctypes.byref(graph))
        self._device.call("cuGraphInstantiateWithFlags", ctypes.byref(program), graph, ctypes.c_ulonglong(0))
        self._device.call("cuGraphDestroy", graph)
        return Graph(self._device, program)

    def launch(self, graph: Graph) -> None:
        """Does what was recorded. Returns at once."""
        self._device.call("cuGraphLaunch", graph.program, self._handle)

    @property
    def handle(self) -> int:
        """The stream as other libraries take it."""
        return self._handle.value or 0

    def synchronize(self) -> None:
        """Waits on the host for all of it."""
        self._device.call("cuStreamSynchronize", self._handle)

    def close(self) -> None:
        """Destroys it; idempotent."""
        if self._is_owned:
            self._is_owned = False
            self._device.call("cuStreamDestroy_v2", self._handle)


@dataclass(slots=True)
class Event:
    """A place in a stream."""

    device: CudaDevice
    handle: ctypes.c_void_p

    def synchronize(self) -> None:
        """Waits on the host until the work before it is done."""
        self.device.call("cuEventSynchronize", self.handle)

    def seconds_since(self, earlier: Event) -> float:
        """Between two events that are over, by the device's clock."""
        milliseconds = ctypes.c_float()
        self.device.call("cuEventElapsedTime", ctypes.byref(milliseconds), earlier.handle, self.handle)
        return milliseconds.value / 1000

    def close(self) -> None:
        """Destroys it."""
        self.device.call("cuEventDestroy_v2", self.handle)


@dataclass(slots=True)
class Graph:
    """Recorded work of a stream."""

    device: CudaDevice
    program: ctypes.c_void_p

    def close(self) -> None:
        """Destroys it."""
        self.device.call("cuGraphExecDestroy", self.program)
