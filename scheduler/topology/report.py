"""A topology as text: a table for a person, JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Iterator

from scheduler.topology.bandwidth import estimate
from scheduler.topology.topology import Topology

_MEANINGS = (
    ("NV#", "# bonded NVLinks"),
    ("PIX", "at most one PCIe bridge"),
    ("PXB", "several PCIe bridges"),
    ("PHB", "through the CPU's PCIe host bridge"),
    ("NODE", "between host bridges of one NUMA node"),
    ("SYS", "across the sockets"),
    ("SOC", "across the sockets"),
    ("unknown", "not known, which is not SYS"),
)


def to_json(topology: Topology) -> str:
    """Links of all pairs, affinities as shown (null: not shown), warnings; one line."""
    return json.dumps(
        {
            "links": {f"{first}-{second}": topology.link(first, second) for first, second in topology.pairs},
            "cpu_affinity": [gpu.cpu_affinity for gpu in topology.gpus],
            "numa_affinity": [gpu.numa_affinity for gpu in topology.gpus],
            "warnings": list(topology.warnings),
        }
    )


def to_table(topology: Topology) -> str:
    """The link matrix with class and GB/s one way, and per GPU what is known of it."""
    lines = [f"{topology.num_gpus} GPU{'' if topology.num_gpus == 1 else 's'} (source: {topology.source})"]
    if topology.num_gpus > 1:
        lines += ["", "Links: class, estimated GB/s one way", *_matrix(topology), *_legend(topology)]
    if topology.gpus:
        lines += ["", *_align([list(_HEADINGS), *(_facts(topology, index) for index in range(topology.num_gpus))])]
    if topology.nics:
        lines += ["", f"Network adapters: {', '.join(topology.nics)}"]
    lines += [f"warning: {warning}" for warning in topology.warnings]
    return "\n".join(lines)


_HEADINGS = ("GPU", "name", "NUMA", "CPUs", "PCIe", "bus id")


def _matrix(topology: Topology) -> list[str]:
    names = [f"GPU{index}" for index in range(topology.num_gpus)]
    rows = [["", *names]]
    for first, name in enumerate(names):
        rows.append([name, *(_cell(topology, first, second) for second in range(topology.num_gpus))])
    return _align(rows)


def _cell(topology: Topology, first: int, second: int) -> str:
    link = topology.link(first, second)
    if first == second:
        return link
    bandwidth = estimate(topology, first, second)
    rate = "?" if bandwidth.gigabytes_per_s is None else f"{bandwidth.gigabytes_per_s:g}"
    return f"{link} {rate}{' staged' if bandwidth.path == 'staged' else ''}"


def _legend(topology: Topology) -> Iterator[str]:
    links = {"NV#" if link.startswith("NV") else link for link in topology.links.values()}
    shown = "; ".join(f"{link}: {meaning}" for link, meaning in _MEANINGS if link in links)
    yield shown
    cells = [estimate(topology, *pair) for pair in topology.pairs]
    if any(cell.gigabytes_per_s is None for cell in cells):
        yield "?: not known without the GPU's name"
    if any(cell.path == "staged" for cell in cells):
        yield "staged: no peer access, copies go through host memory"


def _facts(topology: Topology, index: int) -> list[str]:
    gpu = topology.gpus[index]
    pcie = f"gen{gpu.pcie.generation} x{gpu.pcie.width}" if gpu.pcie else "-"
    name = f"{gpu.name or '-'}{' (MIG)' if gpu.is_mig else ''}"
    return [f"GPU{index}", name, gpu.numa_affinity or "-", gpu.cpu_affinity or "-", pcie, gpu.bus_id or "-"]


def _align(rows: list[list[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
