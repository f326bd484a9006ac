"""A `Topology` from what NVML answered: which links are direct, which go through an NVSwitch, how far PCIe is.

Pure. The questions are asked in `nvml.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.topology.links import UNKNOWN
from scheduler.topology.pci import read_address
from scheduler.topology.topology import Gpu, Pair, Topology, all_pairs

_CLASS_OF_ANCESTOR = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t. 0, two chips on one board, is PIX in nvidia-smi as well."""

REMOTE_GPU, REMOTE_NPU, REMOTE_SWITCH, REMOTE_UNKNOWN = 0, 1, 2, 255
"""nvmlIntNvLinkDeviceType_t; an NPU is the CPU's end on POWER9."""


@dataclass(frozen=True, slots=True)
class NvLinkEnd:
    """The far end of one active NVLink. None is what could not be asked."""

    device_type: int | None
    bus_id: str | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What NVML says about one GPU."""

    gpu: Gpu
    nvlinks: tuple[NvLinkEnd, ...] = ()
    has_nvlink_state: bool = True
    """False if the link calls fail otherwise than by "not supported" (vGPU guests, WSL): there may be links."""
    is_virtual: bool = False
    """Passed through to a virtual machine, or a vGPU: PCIe distances are what the hypervisor makes up."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What NVML says about a machine."""

    gpus: tuple[GpuReading, ...] = ()
    ancestors: Mapping[Pair, int] = field(default_factory=dict)
    peer_access: Mapping[Pair, bool] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def assemble(readings: Readings) -> Topology:
    """The topology that the readings describe."""
    gpus = tuple(reading.gpu for reading in readings.gpus)
    warnings = list(readings.warnings)
    pairs = all_pairs(len(gpus))
    nvlinks = {pair: _nvlink(readings, *pair, warnings) for pair in pairs}
    pcie = {pair: _CLASS_OF_ANCESTOR.get(readings.ancestors.get(pair, -1), UNKNOWN) for pair in pairs}
    if any(reading.is_virtual for reading in readings.gpus) and len(set(pcie.values())) == 1:
        warnings.append(f"virtual machine: all PCIe distances read {pcie[pairs[0]]}, so they are unknown")
        pcie = dict.fromkeys(pairs, UNKNOWN)
    peer_access = dict(readings.peer_access)
    mig = [index for index, gpu in enumerate(gpus) if gpu.is_mig]
    if mig:
        warnings.append(f"MIG is on for {_name(mig)}: no peer access between instances")
        peer_access |= {pair: False for pair in pairs if set(pair) & set(mig)}
    refused = [f"{first}-{second}" for first, second in pairs if peer_access.get((first, second)) is False]
    if refused:
        shown = f"{', '.join(refused[:8])}{', ...' if len(refused) > 8 else ''}"
        warnings.append(f"peer access refused, copies go through host memory: {shown} ({len(refused)} in all)")
    has_state = all(reading.has_nvlink_state for reading in readings.gpus)
    if not has_state:
        warnings.append("NVLink not shown: its state cannot be read, so a PCIe class does not mean that there is none")
    return Topology(
        gpus=gpus,
        links={pair: nvlinks[pair] or pcie[pair] for pair in pairs},
        peer_access=peer_access,
        shows_nvlink=has_state if gpus else None,
        warnings=tuple(warnings),
        source="nvml",
    )


def _nvlink(readings: Readings, first: int, second: int, warnings: list[str]) -> str | None:
    """NV# if NVLinks join the two, "unknown" if some may, None if none does.

    Counted link by link, as machines mix direct links with a switch; of the two paths the wider one counts.
    """
    one, other = readings.gpus[first], readings.gpus[second]
    there = _num_direct(one, other.gpu.bus_id)
    back = _num_direct(other, one.gpu.bus_id)
    if there != back:
        warnings.append(f"GPU{first}-GPU{second}: {there} NVLinks one way, {back} the other: the smaller counts")
    direct = min(there, back)
    switched = min(_num_switched(one), _num_switched(other))
    if direct or switched:
        return f"NV{max(direct, switched)}"
    if there or back or (_has_unknown_end(one, readings) and _has_unknown_end(other, readings)):
        warnings.append(f"GPU{first}-GPU{second}: NVLinks whose far end is unknown")
        return UNKNOWN
    return None


def _num_direct(reading: GpuReading, bus_id: str | None) -> int:
    address = read_address(bus_id)
    return sum(
        end.device_type not in (REMOTE_NPU, REMOTE_SWITCH)
        and address is not None
        and read_address(end.bus_id) == address
        for end in reading.nvlinks
    )


def _num_switched(reading: GpuReading) -> int:
    return sum(end.device_type == REMOTE_SWITCH for end in reading.nvlinks)


def _has_unknown_end(reading: GpuReading, readings: Readings) -> bool:
    """Whether a link ends neither at a GPU, seen here or hidden from this container, nor at a switch or NPU."""
    known = {read_address(other.gpu.bus_id) for other in readings.gpus} - {None}
    return any(
        end.device_type in (None, REMOTE_UNKNOWN) and read_address(end.bus_id) not in known for end in reading.nvlinks
    )


def _name(indices: list[int]) -> str:
    return ", ".join(f"GPU{index}" for index in indices)
