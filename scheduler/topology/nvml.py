"""The questions to NVML, through the package nvidia-ml-py. Every call may fail for itself and is caught by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.topology.cpu_list import read_list, write_list
from scheduler.topology.fabric import GpuReading, NvLinkEnd, Readings
from scheduler.topology.sysfs import SYSFS, read_place
from scheduler.topology.topology import Gpu, Pair, PcieLink, all_pairs

_CPU_WORDS = 128  # of 64 CPUs each: 8192, NR_CPUS of distribution kernels
_NODE_WORDS = 16  # of 64 NUMA nodes each: 1024, MAX_NUMNODES
_READ, _WRITE = 0, 1  # indices of nvmlDeviceGetP2PStatus; the package's constant for read is a tuple by mistake
_STATUS_OK, _STATUS_UNKNOWN = 0, 6  # nvmlGpuP2PStatus_t; all between are refusals
_SCOPE_NODE = 0


class NvmlUnavailable(Exception):
    """NVML cannot be asked at all. The message is one line that says why."""


def read_nvml(sysfs: Path = SYSFS) -> Readings:
    """What NVML and, for NUMA nodes and CPUs that it does not know, `sysfs` say about this machine.

    Raises:
        NvmlUnavailable: no package, no library, no driver.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnavailable(f"the package nvidia-ml-py is not installed ({error})") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML does not start: {error}") from error
    try:
        return _Reader(pynvml, sysfs).read()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML does not count the GPUs: {error}") from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class _Reader:
    """One reading of the machine, and the failures met on the way."""

    def __init__(self, nvml: Any, sysfs: Path) -> None:
        self._nvml = nvml
        self._sysfs = sysfs
        self._failures: dict[str, set[int]] = defaultdict(set)
        self._handles: list[Any] = []

    def read(self) -> Readings:
        """All readings. Raises `NVMLError` if the GPUs cannot be counted."""
        count = self._nvml.nvmlDeviceGetCount()
        self._handles = [self._ask(index, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        gpus = tuple(self._read_gpu(index) for index in range(count))
        ancestors: dict[Pair, int] = {}
        peer_access: dict[Pair, bool] = {}
        for pair in all_pairs(count):
            self._read_pair(pair, ancestors, peer_access)
        warnings = [
            f"{failure} for {', '.join(f'GPU{index}' for index in sorted(indices))}"
            for failure, indices in self._failures.items()
        ]
        return Readings(gpus, ancestors, peer_access, tuple(warnings))

    def _ask(self, index: int, function: str, *arguments: Any, absent: frozenset[str] = frozenset()) -> Any:
        """The answer, or None. A failure is noted against GPU `index` unless its kind means plain absence."""
        call = getattr(self._nvml, function, None)
        if call is None or any(argument is None for argument in arguments):
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            if type(error).__name__ not in absent:
                self._failures[f"{function}: {error}"].add(index)
            return None

    def _has_failed(self, index: int, function: str) -> bool:
        return any(index in gpus for failure, gpus in self._failures.items() if failure.startswith(f"{function}:"))

    def _read_gpu(self, index: int) -> GpuReading:
        handle = self._handles[index]
        if handle is None:
            return GpuReading(Gpu(), has_nvlink_state=False)
        pci = self._ask(index, "nvmlDeviceGetPciInfo", handle)
        bus_id = _text(pci.busId) if pci is not None else None
        nvlinks, has_state, version = self._read_nvlinks(index, handle)
        mig = self._ask(index, "nvmlDeviceGetMigMode", handle, absent=_NOT_SUPPORTED)
        node = self._ask(index, "nvmlDeviceGetNumaNodeId", handle, absent=_NOT_SUPPORTED | {"NVMLError_NotFound"})
        gpu = Gpu(
            gpu_numa_id="N/A" if node is None or node < 0 else str(node),
            name=_text(self._ask(index, "nvmlDeviceGetName", handle)),
            uuid=_text(self._ask(index, "nvmlDeviceGetUUID", handle)),
            bus_id=bus_id,
            pcie=self._read_pcie(index, handle),
            nvlink_version=version,
            is_mig=None if self._has_failed(index, "nvmlDeviceGetMigMode") else bool(mig and mig[0]),
        )
        mode = self._ask(index, "nvmlDeviceGetVirtualizationMode", handle, absent=_NOT_SUPPORTED)
        return GpuReading(self._with_affinity(index, handle, gpu), nvlinks, has_state, is_virtual=mode in (1, 2))

    def _read_pcie(self, index: int, handle: Any) -> PcieLink | None:
        """The fastest link that GPU and slot can train: the present one is slower while the GPU idles."""
        generation = self._ask(index, "nvmlDeviceGetMaxPcieLinkGeneration", handle, absent=_NOT_SUPPORTED)
        width = self._ask(index, "nvmlDeviceGetMaxPcieLinkWidth", handle, absent=_NOT_SUPPORTED)
        return PcieLink(generation, width) if generation and width else None

    def _read_nvlinks(self, index: int, handle: Any) -> tuple[tuple[NvLinkEnd, ...], bool, int | None]:
        """The active links, whether their state can be read, and the NVLink version of the first."""
        ends: list[NvLinkEnd] = []
        version: int | None = None
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            if self._ask(index, "nvmlDeviceGetNvLinkState", handle, link, absent=_NO_LINK) != 1:
                continue
            remote = self._ask(index, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link, absent=_NO_LINK)
            device_type = self._ask(
                index, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link, absent=_NO_LINK | _NO_FUNCTION
            )
            ends.append(NvLinkEnd(device_type, _text(remote.busId) if remote is not None else None))
            if version is None:
                version = self._ask(index, "nvmlDeviceGetNvLinkVersion", handle, link, absent=_NO_LINK)
        return tuple(ends), not self._has_failed(index, "nvmlDeviceGetNvLinkState"), version

    def _with_affinity(self, index: int, handle: Any, gpu: Gpu) -> Gpu:
        """`gpu` with its near CPUs and host NUMA nodes: NVML's, else the kernel's."""
        words = self._ask(index, "nvmlDeviceGetCpuAffinity", handle, _CPU_WORDS, absent=_NOT_SUPPORTED)
        cpus = _numbers(words)
        words = self._ask(index, "nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, _SCOPE_NODE, absent=_NO_AFFINITY)
        nodes = _numbers(words)
        place = read_place(gpu.bus_id, self._sysfs) if gpu.bus_id else None
        if not cpus and place is not None and place.cpu_list:
            cpus = read_list(place.cpu_list) or frozenset()
        if not nodes and place is not None and place.numa_node is not None:
            nodes = frozenset({place.numa_node})
        return replace(
            gpu,
            cpu_affinity=write_list(cpus) if cpus else None,
            numa_affinity=write_list(nodes) if nodes else "N/A",
            cpus=cpus or None,
            numa_nodes=nodes or None,
        )

    def _read_pair(self, pair: Pair, ancestors: dict[Pair, int], peer_access: dict[Pair, bool]) -> None:
        first, second = (self._handles[index] for index in pair)
        ancestor = self._ask(pair[0], "nvmlDeviceGetTopologyCommonAncestor", first, second)
        if ancestor is not None:
            ancestors[pair] = ancestor
        statuses = [
            self._ask(index, "nvmlDeviceGetP2PStatus", one, other, direction, absent=_NOT_SUPPORTED)
            for index, one, other in ((pair[0], first, second), (pair[1], second, first))
            for direction in (_READ, _WRITE)
        ]
        if any(status not in (None, _STATUS_OK, _STATUS_UNKNOWN) for status in statuses):
            peer_access[pair] = False
        elif all(status == _STATUS_OK for status in statuses):
            peer_access[pair] = True


_NOT_SUPPORTED = frozenset({"NVMLError_NotSupported"})
_NO_FUNCTION = frozenset({"NVMLError_FunctionNotFound"})
_NO_LINK = _NOT_SUPPORTED | {"NVMLError_InvalidArgument"}  # a link number that this GPU does not have
_NO_AFFINITY = _NOT_SUPPORTED | _NO_FUNCTION  # the call came with driver 455


def _numbers(words: Iterable[int] | None) -> frozenset[int]:
    """The set bits of NVML's 64-bit words."""
    return frozenset(64 * place + bit for place, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1)


def _text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
