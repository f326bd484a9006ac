"""GB/s one way, against the figures that vendors give for whole GPUs."""

import pytest

from scheduler.topology import Gpu, PcieLink, Topology
from scheduler.topology.bandwidth import SOCKET_GIGABYTES_PER_S, Bandwidth, estimate


def pair(link: str, name: str | None = None, has_peer_access: bool | None = None, **facts: object) -> Topology:
    gpu = Gpu(name=name, **facts)  # type: ignore[arg-type]
    peers = {} if has_peer_access is None else {(0, 1): has_peer_access}
    return Topology(gpus=(gpu, gpu), links={(0, 1): link}, peer_access=peers)


@pytest.mark.parametrize(
    ("name", "link", "gigabytes_per_s"),
    [
        ("Tesla P100-SXM2-16GB", "NV4", 80),
        ("Tesla V100-SXM2-32GB", "NV6", 150),
        ("NVIDIA GeForce RTX 2080 Ti", "NV2", 50),
        ("NVIDIA A100-SXM4-80GB", "NV12", 300),
        ("NVIDIA A100-SXM4-40GB", "NV4", 100),
        ("NVIDIA A800-SXM4-80GB", "NV8", 200),
        ("NVIDIA GeForce RTX 3090", "NV4", 56),
        ("NVIDIA RTX A6000", "NV4", 56),
        ("NVIDIA A40", "NV4", 56),
        ("NVIDIA H100 80GB HBM3", "NV18", 450),
        ("NVIDIA H200", "NV18", 450),
        ("NVIDIA H800", "NV8", 200),
        ("NVIDIA GH200 480GB", "NV6", 150),
        ("NVIDIA B200", "NV18", 900),
        ("NVIDIA GB200", "NV18", 900),
    ],
)
def test_nvlink_carries_what_the_gpu_has_per_link(name: str, link: str, gigabytes_per_s: float) -> None:
    assert estimate(pair(link, name), 0, 1) == Bandwidth(gigabytes_per_s, "nvlink")


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes_per_s"),
    [(3, 16, 12), (4, 16, 24), (5, 16, 48), (4, 8, 12), (3, 4, 3), (1, 1, 3 / 16)],
)
def test_pcie_scales_with_generation_and_lanes(generation: int, width: int, gigabytes_per_s: float) -> None:
    topology = pair("PIX", pcie=PcieLink(generation, width))

    assert estimate(topology, 0, 1) == Bandwidth(gigabytes_per_s, "pcie")


@pytest.mark.parametrize(
    ("name", "gigabytes_per_s"),
    [("Tesla V100-PCIE-16GB", 12), ("NVIDIA L40S", 24), ("NVIDIA A10", 24), ("NVIDIA H100 PCIe", 48), ("Foo 9", None)],
)
def test_the_name_tells_the_generation_where_the_machine_does_not(name: str, gigabytes_per_s: float | None) -> None:
    assert estimate(pair("PXB", name), 0, 1) == Bandwidth(gigabytes_per_s, "pcie")


@pytest.mark.parametrize("link", ["SYS", "SOC"])
def test_the_socket_interconnect_is_the_bottleneck_across_sockets(link: str) -> None:
    topology = pair(link, "NVIDIA H100 PCIe")

    assert estimate(topology, 0, 1) == Bandwidth(10, "socket")
    assert estimate(topology, 0, 1, SOCKET_GIGABYTES_PER_S["sapphire rapids"]) == Bandwidth(22, "socket")


@pytest.mark.parametrize("link", ["NV12", "PIX", "NODE"])
def test_refused_peer_access_halves_pcie_whatever_the_link(link: str) -> None:
    topology = pair(link, "NVIDIA A100-SXM4-80GB", has_peer_access=False)

    assert estimate(topology, 0, 1) == Bandwidth(12, "staged")


def test_mig_instances_copy_through_the_host() -> None:
    assert estimate(pair("NV12", "NVIDIA A100-SXM4-80GB", is_mig=True), 0, 1) == Bandwidth(12, "staged")


def test_the_slower_gpu_of_a_pair_counts() -> None:
    gpus = (Gpu(name="NVIDIA GeForce RTX 5090"), Gpu(name="NVIDIA GeForce RTX 3090", pcie=PcieLink(3, 4)))
    topology = Topology(gpus=gpus, links={(0, 1): "PHB"})

    assert estimate(topology, 0, 1) == estimate(topology, 1, 0) == Bandwidth(3, "pcie")


@pytest.mark.parametrize(
    ("link", "path"), [("NV4", "nvlink"), ("PIX", "pcie"), ("SYS", "socket"), ("unknown", "unknown")]
)
def test_without_a_name_nothing_is_made_up(link: str, path: str) -> None:
    assert estimate(pair(link), 0, 1) == Bandwidth(None, path)


def test_an_unknown_link_has_no_bandwidth_even_between_known_gpus() -> None:
    assert estimate(pair("unknown", "NVIDIA H200"), 0, 1) == Bandwidth(None, "unknown")


@pytest.mark.parametrize(("version", "gigabytes_per_s"), [(1, 40), (2, 50), (4, None), (6, 50), (7, 100)])
def test_the_nvlink_version_stands_in_for_an_unknown_name(version: int, gigabytes_per_s: float | None) -> None:
    topology = pair("NV2", "NVIDIA Graphics Device", nvlink_version=version)

    assert estimate(topology, 0, 1) == Bandwidth(gigabytes_per_s, "nvlink")
