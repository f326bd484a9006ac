"""What is known about the GPUs of one machine and the links between them, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.topology.links import SELF, UNKNOWN

Pair = tuple[int, int]
"""Two GPU indices, the smaller first."""


class TopologyRefused(ValueError):
    """The text holds no link matrix. The message is one line that says why."""


@dataclass(frozen=True, slots=True)
class PcieLink:
    """The fastest PCIe connection that a GPU and its slot can train."""

    generation: int
    width: int  # lanes


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Every None is something that the source did not tell."""

    cpu_affinity: str | None = None
    """As shown. The empty string is a cell that was shown empty, "N/A" one that said so."""
    numa_affinity: str | None = None
    gpu_numa_id: str | None = None
    """NUMA node of the GPU's own memory: a number on Grace, "N/A" elsewhere."""
    cpus: frozenset[int] | None = None
    """The near CPUs; None unless the list is whole."""
    numa_nodes: frozenset[int] | None = None
    """The near host NUMA nodes; None unless the list is whole."""
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    pcie: PcieLink | None = None
    nvlink_version: int | None = None
    """As `nvmlDeviceGetNvLinkVersion` counts: 1 is 1.0, 2 2.0, 3 2.2, 4 3.0, 5 3.1, 6 4.0, 7 5.0."""
    is_mig: bool | None = None


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs of one machine in nvidia-smi's order (by PCI bus id), and the links between them.

    CUDA numbers GPUs fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set; map by `Gpu.uuid` where it is not.
    """

    gpus: tuple[Gpu, ...] = ()
    links: Mapping[Pair, str] = field(default_factory=dict)
    """Every pair i < j, to the class as shown (`links.py`) or "unknown"."""
    peer_access: Mapping[Pair, bool] = field(default_factory=dict)
    """Whether the two may read and write each other's memory; a pair that is absent was not asked."""
    nics: tuple[str, ...] = ()
    """Network adapters seen beside the GPUs, by name where a legend gives one."""
    shows_nvlink: bool | None = None
    """False if the source hides NVLink (`topo -mp`): then a PCIe class does not mean that there is none."""
    warnings: tuple[str, ...] = ()
    source: str = "text"

    @property
    def num_gpus(self) -> int:
        """Number of GPUs, those included of which nothing but the index is known."""
        return len(self.gpus)

    @property
    def pairs(self) -> list[Pair]:
        """All pairs, ascending."""
        return all_pairs(self.num_gpus)

    def link(self, first: int, second: int) -> str:
        """The class between two GPUs in either order; "X" of a GPU with itself."""
        if first == second:
            return SELF
        return self.links.get((min(first, second), max(first, second)), UNKNOWN)

    def has_peer_access(self, first: int, second: int) -> bool | None:
        """Whether the two may read and write each other's memory; None where nobody asked."""
        if first == second:
            return True
        return self.peer_access.get((min(first, second), max(first, second)))


def all_pairs(num_gpus: int) -> list[Pair]:
    """All pairs i < j of `num_gpus` GPUs, ascending."""
    return [(first, second) for first in range(num_gpus) for second in range(first + 1, num_gpus)]
