"""The topology of this machine, from the best source that answers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scheduler.topology.cpu_list import read_list
from scheduler.topology.fabric import assemble
from scheduler.topology.links import UNKNOWN
from scheduler.topology.matrix import parse
from scheduler.topology.nvml import NvmlUnavailable, read_nvml
from scheduler.topology.sysfs import SYSFS, list_gpus, read_place
from scheduler.topology.text import decode
from scheduler.topology.topology import Gpu, Topology, TopologyRefused, all_pairs

TOPO_COMMAND = ("nvidia-smi", "topo", "-m")

TOPO_TIMEOUT_S = 30.0
"""Seconds granted to `nvidia-smi topo -m`. It has been seen to take 112 s; a server start does not wait so long."""


class TopoFailed(Exception):
    """`nvidia-smi topo -m` gave nothing to read. The message is one line that says why."""


def discover(sysfs: Path = SYSFS, command: Sequence[str] = TOPO_COMMAND, timeout_s: float = TOPO_TIMEOUT_S) -> Topology:
    """The topology of this machine: from NVML, else from `command`, else flat.

    `source` says which it was ("nvml", "nvidia-smi", "sysfs", "none"), `warnings` what failed on the way. Flat means
    that the GPUs which the kernel lists are known and every link is "unknown". Never raises for a machine's sake.
    """
    try:
        readings = read_nvml(sysfs)
    except NvmlUnavailable as unavailable:
        return _without_nvml(str(unavailable), sysfs, command, timeout_s)
    topology = assemble(readings)
    is_untold = not readings.ancestors and all(link == UNKNOWN for link in topology.links.values())
    return _with_links_of_text(topology, command, timeout_s) if topology.links and is_untold else topology


def read_topo(command: Sequence[str] = TOPO_COMMAND, timeout_s: float = TOPO_TIMEOUT_S) -> Topology:
    """What `command` prints, read.

    Its exit code does not matter if it printed a matrix: it has been seen to print one and exit with 255.

    Raises:
        TopoFailed: it is missing, does not end in time, or prints something else.
    """
    name = " ".join(command)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise TopoFailed(f"`{name}` took longer than {timeout_s:g} s") from error
    except OSError as error:
        raise TopoFailed(f"`{name}` cannot be run: {error.strerror or error}") from error
    try:
        topology = parse(decode(done.stdout))
    except TopologyRefused as refused:
        raise TopoFailed(f"`{name}` (exit code {done.returncode}): {refused}") from refused
    if done.returncode != 0:
        warning = f"`{name}` printed a matrix and exited with {done.returncode}"
        topology = replace(topology, warnings=(*topology.warnings, warning))
    return replace(topology, source="nvidia-smi")


def _without_nvml(why: str, sysfs: Path, command: Sequence[str], timeout_s: float) -> Topology:
    try:
        topology = read_topo(command, timeout_s)
    except TopoFailed as failed:
        return _flat(sysfs, (why, str(failed)))
    return replace(topology, warnings=(why, *topology.warnings))


def _with_links_of_text(topology: Topology, command: Sequence[str], timeout_s: float) -> Topology:
    """`topology` with the links that `command` knows, if it counts the same GPUs."""
    try:
        text = read_topo(command, timeout_s)
    except TopoFailed as failed:
        return replace(topology, warnings=(*topology.warnings, f"no link is known; {failed}"))
    if text.num_gpus != topology.num_gpus:
        warning = f"no link is known; `{' '.join(command)}` counts {text.num_gpus} GPUs, NVML {topology.num_gpus}"
        return replace(topology, warnings=(*topology.warnings, warning))
    warnings = (*topology.warnings, f"links read from `{' '.join(command)}`", *text.warnings)
    return replace(topology, links=text.links, nics=text.nics, shows_nvlink=text.shows_nvlink, warnings=warnings)


def _flat(sysfs: Path, warnings: tuple[str, ...]) -> Topology:
    """The GPUs that the kernel lists, all links unknown."""
    gpus = tuple(_gpu_at(bus_id, sysfs) for bus_id in list_gpus(sysfs))
    links = dict.fromkeys(all_pairs(len(gpus)), UNKNOWN)
    return Topology(gpus=gpus, links=links, warnings=warnings, source="sysfs" if gpus else "none")


def _gpu_at(bus_id: str, sysfs: Path) -> Gpu:
    place = read_place(bus_id, sysfs)
    node = place.numa_node
    return Gpu(
        cpu_affinity=place.cpu_list,
        numa_affinity="N/A" if node is None else str(node),
        cpus=read_list(place.cpu_list or ""),
        numa_nodes=None if node is None else frozenset({node}),
        bus_id=bus_id,
    )
