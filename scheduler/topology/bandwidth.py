"""What a link can carry, in GB/s one way: an estimate for placement, not a measurement.

A class alone does not tell: NV4 is 100 GB/s between two A100, 56 between two RTX 3090. So the names of the GPUs are
needed for NVLink, and the PCIe generation or the names for the rest. Where they are missing the answer is None, and
only the order of classes (`links.distance`) is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scheduler.topology.links import PCIE_CLASSES, num_nvlinks
from scheduler.topology.topology import Gpu, PcieLink, Topology

# GB/s one way of one NVLink, and what a whole GPU has.
_NVLINK_GIGABYTES_PER_S = (
    (r"P100|GP100", 20.0),  # NVLink 1: 4 links, 80 (NVIDIA Tesla P100 whitepaper)
    (r"V100|GV100", 25.0),  # NVLink 2: 6 links, 150 (Tesla V100 whitepaper)
    (r"RTX 20[0-9]{2}|TITAN RTX|Quadro RTX", 25.0),  # NVLink 2 over x8 sub-links: 1 or 2 links (Turing whitepaper)
    (r"A100|A800|A30", 25.0),  # NVLink 3: A100 12 links, 300; A800 8 links, 200 (A100 whitepaper)
    (r"RTX 3090|RTX A[0-9]{4}|A40", 14.0),  # NVLink 3 over x4 sub-links: 4 links, 56 (GA102 whitepaper)
    (r"H100|H200|H20|GH200|H800", 25.0),  # NVLink 4: H100 18 links, 450; H800 8 links, 200 (H100 whitepaper)
    (r"B100|B200|B300|GB200|GB300", 50.0),  # NVLink 5: 18 links, 900 (Blackwell architecture brief)
)
# The same by nvmlDeviceGetNvLinkVersion, for a GPU that the list above does not know. 3.0 and 3.1 may be 25 or 14.
_GIGABYTES_PER_S_BY_VERSION = {1: 20.0, 2: 25.0, 3: 25.0, 6: 25.0, 7: 50.0}

# The newest PCIe generation of a GPU, where the machine does not tell (data sheets). First match counts.
_PCIE_GENERATION = (
    (r"B300|GB300", 6),
    (r"H100|H200|H20|H800|GH200|B100|B200|GB200|RTX 50[0-9]{2}|RTX PRO", 5),
    (r"A100|A800|A30|A40|A10|A16|A2|L4|L40S?|RTX [34]0[0-9]{2}|RTX A[0-9]{4}|RTX [0-9]{4} Ada", 4),
    (r"P100|V100|GP100|GV100|P40|P4|T4|M60|K80|TITAN|GTX 1[0-9]{3}|RTX 20[0-9]{2}|Quadro RTX", 3),
)

PCIE_GEN3_X16_GIGABYTES_PER_S = 12.0
"""What NCCL plans with for generation 3 x16 (15.75 in theory); each generation doubles it, lanes scale it."""

FULL_PCIE_WIDTH = 16

SOCKET_GIGABYTES_PER_S = {"skylake": 10.0, "sapphire rapids": 22.0, "amd": 16.0}
"""Between the sockets of a machine, as NCCL plans (src/graph/topo.h)."""

UNKNOWN_SOCKET_GIGABYTES_PER_S = min(SOCKET_GIGABYTES_PER_S.values())

STAGED_SHARE = 0.5
"""Without peer access every byte crosses PCIe twice, through host memory."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """An estimate and the path that it is for: "nvlink", "pcie", "socket", "staged", "self" or "unknown"."""

    gigabytes_per_s: float | None
    path: str


def estimate(
    topology: Topology, first: int, second: int, socket_gigabytes_per_s: float = UNKNOWN_SOCKET_GIGABYTES_PER_S
) -> Bandwidth:
    """The estimate for copying from one GPU of `topology` to another, in either direction.

    `socket_gigabytes_per_s` is for the CPU of the machine; by default the slowest known.
    """
    if first == second:
        return Bandwidth(None, "self")
    one, other = topology.gpus[first], topology.gpus[second]
    link = topology.link(first, second)
    pcie = pcie_gigabytes_per_s(one, other)
    if pcie is not None and link in ("SYS", "SOC"):
        pcie = min(pcie, socket_gigabytes_per_s)
    if topology.has_peer_access(first, second) is False or one.is_mig or other.is_mig:
        return Bandwidth(None if pcie is None else pcie * STAGED_SHARE, "staged")
    if num_nvlinks(link):
        return Bandwidth(nvlink_gigabytes_per_s(link, one, other), "nvlink")
    if link in ("SYS", "SOC"):
        return Bandwidth(pcie, "socket")
    return Bandwidth(pcie, "pcie") if link in PCIE_CLASSES else Bandwidth(None, "unknown")


def nvlink_gigabytes_per_s(link: str, one: Gpu, other: Gpu) -> float | None:
    """One way over all bonded NVLinks of `link`; the slower GPU counts. None if a GPU is unknown."""
    rates = [_nvlink_rate(gpu) for gpu in (one, other)]
    known = [rate for rate in rates if rate is not None]
    return num_nvlinks(link) * min(known) if len(known) == len(rates) else None


def pcie_gigabytes_per_s(one: Gpu, other: Gpu) -> float | None:
    """One way between two GPUs over PCIe; the slower counts. None if neither link nor name of one is known."""
    rates = [_pcie_rate(gpu) for gpu in (one, other)]
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == len(rates) else None


def _nvlink_rate(gpu: Gpu) -> float | None:
    by_version = _GIGABYTES_PER_S_BY_VERSION.get(gpu.nvlink_version or 0)
    return next((rate for models, rate in _NVLINK_GIGABYTES_PER_S if _is_model(gpu.name, models)), by_version)


def _pcie_rate(gpu: Gpu) -> float | None:
    newest = next((generation for models, generation in _PCIE_GENERATION if _is_model(gpu.name, models)), None)
    if gpu.pcie is None and newest is None:
        return None
    pcie = gpu.pcie or PcieLink(generation=newest or 0, width=FULL_PCIE_WIDTH)
    doublings: int = pcie.generation - 3
    return PCIE_GEN3_X16_GIGABYTES_PER_S * 2.0**doublings * min(pcie.width, FULL_PCIE_WIDTH) / FULL_PCIE_WIDTH


def _is_model(name: str | None, models: str) -> bool:
    """Whether a product name as NVML gives it ("NVIDIA A100-SXM4-80GB") is of one of the models."""
    return (
        name is not None and re.search(rf"(?<![A-Za-z0-9])(?:{models})(?![A-Za-z0-9])", name, re.IGNORECASE) is not None
    )
