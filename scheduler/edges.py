"""What joins the devices of a machine, as placement compares it."""

from __future__ import annotations

from scheduler.plan import Link
from scheduler.topology import Topology
from scheduler.topology.bandwidth import estimate
from scheduler.topology.links import distance, num_nvlinks

TIERS = ("device", "nvlink", "switch", "numa", "any")
"""Best first: the same device, NVLink, a PCIe switch, one NUMA node, anything."""

_TIER_OF = {"PIX": "switch", "PXB": "switch", "PHB": "numa", "NODE": "numa"}


def link_of(topology: Topology, first: int, second: int, names: tuple[str, str]) -> Link:
    """The link between two devices of a topology, under their names in the plan."""
    bandwidth = estimate(topology, first, second)
    return Link(
        first=names[0],
        second=names[1],
        link=topology.link(first, second),
        gigabytes_per_s=bandwidth.gigabytes_per_s,
        path=bandwidth.path,
        has_peer_access=topology.has_peer_access(first, second),
    )


def tier_of(link: Link) -> str:
    """How near a link is. Without peer access it is never better than "numa"."""
    if link.is_staged:
        return "any" if link.link in ("SYS", "SOC", "unknown") else "numa"
    return "nvlink" if link.is_nvlink else _TIER_OF.get(link.link, "any")


def describe_link(link: Link) -> str:
    """`NV12, 300 GB/s`."""
    rate = "GB/s not known" if link.gigabytes_per_s is None else f"{link.gigabytes_per_s:g} GB/s"
    return f"{link.link}, {rate}{', through host memory' if link.is_staged else ''}"


class Edges:
    """Weights of all pairs of a topology: estimated GB/s, or class points where a GPU is unknown."""

    def __init__(self, topology: Topology) -> None:
        rates = {pair: estimate(topology, *pair).gigabytes_per_s for pair in topology.pairs}
        self.are_rates = all(rate is not None for rate in rates.values())
        self._weights = {
            pair: rate if self.are_rates and rate is not None else -float(distance(topology.link(*pair)))
            for pair, rate in rates.items()
        }
        self._is_good = {pair: num_nvlinks(topology.link(*pair)) > 0 for pair in topology.pairs}
        self._numa = [gpu.numa_nodes or frozenset() for gpu in topology.gpus]

    def weight(self, first: int, second: int) -> float:
        """More is better; comparable within one topology only."""
        return self._weights[min(first, second), max(first, second)]

    def num_broken(self, used: set[int]) -> int:
        """NVLink pairs of which one end is used and the other is left over."""
        return sum(good and (first in used) != (second in used) for (first, second), good in self._is_good.items())

    def crowding(self, encoders: set[int], decoders: set[int]) -> float:
        """Decoders per encoder on the NUMA node where that is worst; a node without encoders counts as half of one."""
        nodes = {node for d in decoders for node in self._numa[d]}
        return max(
            (
                sum(node in self._numa[d] for d in decoders) / max(0.5, sum(node in self._numa[e] for e in encoders))
                for node in nodes
            ),
            default=0.0,
        )
