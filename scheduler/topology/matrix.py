"""The text of `nvidia-smi topo -m`, recorded or live, as a `Topology`.

Every claim is checked against the shape of the matrix: row i has its "X" in column i, and the link of a pair stands
twice. What fails a check is left unknown and warned of; nothing is guessed, and an unknown pair never becomes SYS.
"""

from __future__ import annotations

import re
from collections import Counter

from scheduler.topology.affinity import Affinity, read_affinity, settle
from scheduler.topology.block import Block, read_blocks
from scheduler.topology.cpu_list import may_be_truncated, read_list
from scheduler.topology.grid import Grid
from scheduler.topology.links import UNKNOWN, num_nvlinks
from scheduler.topology.text import read_lines
from scheduler.topology.topology import Gpu, Pair, Topology, TopologyRefused

_ERROR = re.compile(
    r"NVIDIA-SMI has failed|command not found|command line argument|not recognized|Failed to initialize NVML"
    r"|No devices were found|Invalid combination|Unable to determine|Option .{0,40} is missing|Driver/library version",
    re.IGNORECASE,
)


def parse(text: str) -> Topology:
    """The first link matrix in `text`.

    Raises:
        TopologyRefused: there is none: an error message, a `topo -p2p` matrix, something else, nothing.
    """
    lines = read_lines(text)
    blocks = read_blocks(lines)
    block = next((block for block in blocks if block.is_link_matrix), None)
    grid = Grid(block) if block is not None else None
    if block is None or grid is None or not grid.rows:
        raise TopologyRefused(_reason(lines, blocks))
    if 2 * len(grid.rows) < len(block.rows):
        raise TopologyRefused(f"the matrix is too damaged: {len(block.rows) - len(grid.rows)} rows are out of order")
    links = grid.links()
    gpus = _read_gpus(block, grid)
    if len(gpus) > 1 and not any(link != UNKNOWN for link in links.values()):
        raise TopologyRefused("the matrix is too damaged: not one link can be read")
    if any(later.is_link_matrix for later in blocks[blocks.index(block) + 1 :]):
        grid.warnings.append("another matrix follows, of another host or time: only the first is read")
    shows_nvlink = _shows_nvlink(block, links)
    if shows_nvlink is False:
        grid.warnings.append("NVLink not shown (topo -mp): PCIe classes do not mean that there is none")
    unread = [pair for pair, link in links.items() if link == UNKNOWN]
    if unread:
        pairs = ", ".join(f"{first}-{second}" for first, second in unread[:8])
        grid.warnings.append(f"unknown links: {pairs}{', ...' if len(unread) > 8 else ''} ({len(unread)} in all)")
    names = block.header.nics if block.header and len(block.header.nics) >= len(block.nic_rows) else block.nic_rows
    nics = tuple(block.nic_names.get(name, name) for name in names)
    return Topology(gpus=gpus, links=links, nics=nics, shows_nvlink=shows_nvlink, warnings=tuple(grid.warnings))


def _reason(lines: list[str], blocks: list[Block]) -> str:
    """Why there is no link matrix, in one line."""
    if not any(line.strip() for line in lines):
        return "the text is empty"
    if any(block.is_peer_matrix for block in blocks):
        return "this is `nvidia-smi topo -p2p`, which shows permissions; links are shown by `nvidia-smi topo -m`"
    for line in lines:
        if _ERROR.search(line):
            return f"this is an error message, not a matrix: {' '.join(line.split())[:120]}"
    return "no matrix found: expected the output of `nvidia-smi topo -m`, rows such as `GPU0  X  NV12 ...`"


def _shows_nvlink(block: Block, links: dict[Pair, str]) -> bool | None:
    if any(num_nvlinks(link) for link in links.values()) or "NV#" in block.legend:
        return True
    return False if block.hides_nvlink else None


def _read_gpus(block: Block, grid: Grid) -> tuple[Gpu, ...]:
    """One `Gpu` per index, with the affinities that its row shows."""
    read = {
        row.gpu: read_affinity(row, block.header, block.ends_text and row is block.rows[-1])
        for row in grid.rows
        if len(row.cells) == grid.num_columns
    }
    affinities, warnings = settle(read)
    grid.warnings += warnings
    cpus = {gpu: _near(affinity.cpu) for gpu, affinity in affinities.items()}
    for gpu, affinity in affinities.items():
        if affinity.cpu and affinity.cpu != "N/A" and cpus[gpu] is None:
            grid.warnings.append(f"GPU{gpu}: {affinity.cpu!r} may not be the whole CPU list: its CPUs are unknown")
    for gpu in _contradicted(cpus):
        grid.warnings.append(f"GPU{gpu}: its CPU list crosses another GPU's: its CPUs are unknown")
        cpus[gpu] = None
    return tuple(_gpu(affinities.get(gpu, Affinity()), cpus.get(gpu)) for gpu in range(grid.num_gpus))


def _gpu(affinity: Affinity, cpus: frozenset[int] | None) -> Gpu:
    return Gpu(
        cpu_affinity=affinity.cpu,
        numa_affinity=affinity.numa,
        gpu_numa_id=affinity.gpu_numa,
        cpus=cpus,
        numa_nodes=read_list(affinity.numa or ""),
    )


def _near(cpu_affinity: str | None) -> frozenset[int] | None:
    if cpu_affinity is None or may_be_truncated(cpu_affinity):
        return None
    return read_list(cpu_affinity)


def _contradicted(cpus: dict[int, frozenset[int] | None]) -> list[int]:
    """GPUs whose CPUs cross, without equalling, those of as many other GPUs or more: near sets are equal or apart."""
    counts = Counter(near for near in cpus.values() if near is not None)
    return [
        gpu
        for gpu, near in cpus.items()
        if near is not None
        and any(other != near and other & near and count >= counts[near] for other, count in counts.items())
    ]
