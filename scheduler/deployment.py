"""From a profile file to the plan for this machine: reads the profile, its topology and the CPUs there are."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from scheduler.placement import place
from scheduler.plan import Plan
from scheduler.profile import Profile, ProfileRefused, read_profile
from scheduler.topology import Topology, TopologyRefused, parse
from scheduler.topology.discover import discover
from scheduler.topology.text import decode


def read_deployment(path: Path, topology_file: Path | None = None, gpu_name: str | None = None) -> Plan:
    """The plan of a profile file.

    `topology_file` is read instead of what the profile names, or of the machine; `gpu_name` says what its GPUs are.

    Raises:
        ProfileRefused: the profile or its topology cannot be read.
        PlacementRefused: the profile does not fit.
    """
    profile = read_profile(path)
    if gpu_name is not None:
        table = profile.topology.model_copy(update={"gpu_name": gpu_name})
        profile = profile.model_copy(update={"topology": table})
    return plan_for(profile, path, topology_file)


def plan_for(profile: Profile, path: Path, topology_file: Path | None = None) -> Plan:
    """As `read_deployment`, of a profile that was read (and perhaps changed) already; `path` is where it stands."""
    cpus = frozenset(os.sched_getaffinity(0))
    return place(profile, read_topology(profile, path, topology_file), cpus)


def read_topology(profile: Profile, path: Path, topology_file: Path | None = None) -> Topology:
    """The topology that a profile at `path` is placed on; the machine is asked only for a profile with GPUs.

    Raises:
        ProfileRefused: the file cannot be read, or holds no link matrix.
    """
    named_file = None if profile.topology.file is None else path.parent / profile.topology.file
    file = topology_file or named_file
    if file is None:
        devices = (*profile.encode.devices, *profile.decode.devices)
        return Topology(source="none") if set(devices) == {"cpu"} else discover()
    return read_topology_file(file, profile.topology.gpu_name)


def read_topology_file(file: Path, gpu_name: str | None = None) -> Topology:
    """The topology in a recorded text; `gpu_name` says what its GPUs are.

    Raises:
        ProfileRefused: the file cannot be read, or holds no link matrix.
    """
    try:
        topology = parse(decode(file.read_bytes()))
    except OSError as error:
        raise ProfileRefused(f"topology {file}: {error.strerror}") from error
    except TopologyRefused as error:
        raise ProfileRefused(f"topology {file}: {error}") from error
    if gpu_name is None:
        return topology
    return replace(topology, gpus=tuple(replace(gpu, name=gpu_name) for gpu in topology.gpus))
