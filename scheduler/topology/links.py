"""Link classes between two GPUs as `nvidia-smi topo -m` names them, nearest first.

    NV#          # bonded NVLinks
    PIX          at most one PCIe bridge
    PXB          several PCIe bridges, no host bridge
    PHB          a PCIe host bridge (the CPU)
    NODE         between host bridges inside one NUMA node
    SYS, SOC     across the socket interconnect (SOC before driver 384)
    unknown      nothing is known; never a synonym of SYS

A class is neither a bandwidth nor a permission: see `bandwidth.py` for the first, `Topology.peer_access` for the
second.
"""

from __future__ import annotations

import re

UNKNOWN = "unknown"
SELF = "X"

PCIE_CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Nearest first. The meaning of each is in the legend that nvidia-smi prints under the matrix."""

MAX_NVLINKS = 36
"""`NVML_NVLINK_MAX_LINKS` of nvidia-ml-py 13.615.71; a larger number in a text is a damaged cell."""

_NVLINK = re.compile(r"NV([1-9][0-9]?)", re.ASCII)
_FARTHEST_NVLINK = MAX_NVLINKS - 1


def num_nvlinks(link: str) -> int:
    """How many NVLinks are bonded in `link`; 0 for a PCIe class or an unknown link."""
    match = _NVLINK.fullmatch(link)
    return int(match.group(1)) if match and int(match.group(1)) <= MAX_NVLINKS else 0


def is_link(text: str) -> bool:
    """Whether `text` is a class that nvidia-smi prints between two devices."""
    return text in PCIE_CLASSES or text == "SOC" or num_nvlinks(text) > 0


def distance(link: str) -> int:
    """A rank for comparing classes, 0 nearest; only the order means something.

    Wider NVLinks come first. An unknown link ranks behind every known one.
    """
    if nvlinks := num_nvlinks(link):
        return MAX_NVLINKS - nvlinks
    if link in PCIE_CLASSES:
        return _FARTHEST_NVLINK + 1 + PCIE_CLASSES.index(link)
    if link == "SOC":
        return distance("SYS")
    return _FARTHEST_NVLINK + 1 + len(PCIE_CLASSES)


def farther(first: str, second: str) -> str:
    """The worse of two claims about one link; the first where they rank alike."""
    return second if distance(second) > distance(first) else first
