"""Links out of NVML's answers, without NVML."""

import pytest

from scheduler.topology.fabric import REMOTE_GPU, REMOTE_SWITCH, GpuReading, NvLinkEnd, Readings, assemble
from scheduler.topology.topology import Gpu, Topology

BUS = [f"00000000:{bus:02X}:00.0" for bus in (0x17, 0x3B, 0x65, 0xCA)]


def to_gpu(index: int, count: int) -> tuple[NvLinkEnd, ...]:
    return (NvLinkEnd(REMOTE_GPU, BUS[index]),) * count


def to_switch(count: int) -> tuple[NvLinkEnd, ...]:
    return (NvLinkEnd(REMOTE_SWITCH, "00000000:00:00.0"),) * count


def machine(*nvlinks: tuple[NvLinkEnd, ...], ancestor: int = 50, **facts: object) -> Topology:
    gpus = tuple(GpuReading(Gpu(bus_id=BUS[index]), ends, **facts) for index, ends in enumerate(nvlinks))  # type: ignore[arg-type]
    pairs = [(first, second) for first in range(len(gpus)) for second in range(first + 1, len(gpus))]
    return assemble(Readings(gpus, dict.fromkeys(pairs, ancestor)))


def test_links_to_a_switch_join_all_by_the_smaller_count() -> None:
    topology = machine(to_switch(18), to_switch(18), to_switch(17))

    assert topology.links == {(0, 1): "NV18", (0, 2): "NV17", (1, 2): "NV17"}


def test_direct_links_join_two_gpus_only() -> None:
    topology = machine(to_gpu(1, 4), to_gpu(0, 4), (), ancestor=30)

    assert topology.links == {(0, 1): "NV4", (0, 2): "PHB", (1, 2): "PHB"}


def test_a_box_that_mixes_both_is_decided_link_by_link() -> None:
    topology = machine(to_gpu(1, 2) + to_switch(4), to_gpu(0, 2) + to_switch(4), to_switch(4), (), ancestor=40)

    assert topology.links[0, 1] == topology.links[0, 2] == "NV4"
    assert topology.links[2, 3] == "NODE"


@pytest.mark.parametrize(
    ("ancestor", "link"),
    [(0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (99, "unknown")],
)
def test_ancestors_are_classes(ancestor: int, link: str) -> None:
    assert machine((), (), ancestor=ancestor).links == {(0, 1): link}


def test_an_ancestor_that_was_not_told_is_unknown() -> None:
    assert assemble(Readings((GpuReading(Gpu()), GpuReading(Gpu())))).links == {(0, 1): "unknown"}


def test_ends_that_contradict_each_other_are_warned_of() -> None:
    topology = machine(to_gpu(1, 4), to_gpu(0, 3))

    assert topology.links == {(0, 1): "NV3"}
    assert topology.warnings == ("GPU0-GPU1: 4 NVLinks one way, 3 the other: the smaller counts",)


def test_a_link_to_a_hidden_gpu_joins_nobody_here() -> None:
    hidden = (NvLinkEnd(REMOTE_GPU, "00000000:E3:00.0"),)

    assert machine(hidden, hidden, ancestor=20).links == {(0, 1): "PXB"}


def test_links_with_unknown_ends_leave_the_pair_unknown() -> None:
    unknown = (NvLinkEnd(None, "00000000:00:00.0"),)

    assert machine(unknown, unknown, ancestor=20).links == {(0, 1): "unknown"}
    assert machine(unknown, (), ancestor=20).links == {(0, 1): "PXB"}


def test_without_a_device_type_the_bus_id_tells_a_direct_link() -> None:
    assert machine((NvLinkEnd(None, "0000:3b:00.0"),), (NvLinkEnd(None, "0000:17:00.0"),)).links == {(0, 1): "NV1"}


def test_a_virtual_machine_that_shows_one_distance_for_all_knows_none() -> None:
    topology = machine((), (), (), ancestor=30, is_virtual=True)

    assert set(topology.links.values()) == {"unknown"}
    assert topology.warnings == ("virtual machine: all PCIe distances read PHB, so they are unknown",)


def test_nvlink_state_that_cannot_be_read_is_not_its_absence() -> None:
    topology = machine((), (), ancestor=30, has_nvlink_state=False)

    assert topology.shows_nvlink is False
    assert topology.links == {(0, 1): "PHB"}


def test_mig_takes_peer_access_away() -> None:
    gpus = (GpuReading(Gpu(is_mig=True)), GpuReading(Gpu()), GpuReading(Gpu()))
    topology = assemble(Readings(gpus, {}, {(0, 1): True, (0, 2): True, (1, 2): True}))

    assert topology.peer_access == {(0, 1): False, (0, 2): False, (1, 2): True}
