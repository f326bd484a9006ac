"""Policy `article`: the founding article's rule to the letter, for comparison.

    encoder   skip full devices; weight = free slots / 4, times 1.5 with a direct NVLink to the decoder pool; the
              highest weight wins, the first on ties
    decoder   the first on the encoder's node, else the first

A node is the NUMA node of a device; where it is not known, the whole machine. All images of a request go to one
encoder, and a request without images to the first decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.loads import Load
from scheduler.plan import Plan
from scheduler.pools import Pools

SLOTS_PER_DEVICE = 4
NVLINK_BONUS = 1.5


class ArticleRule:
    """The rule over one plan. Pure."""

    def __init__(self, plan: Plan, pools: Pools) -> None:
        self._slots = plan.encode.slots
        self._has_nvlink = [
            any(link is not None and link.is_nvlink for link in (row[e] for row in pools.links))
            for e in range(len(pools.encoders))
        ]
        nodes = {device.name: device.numa_nodes for device in plan.devices}
        self._encoder_nodes = [nodes.get(place, ()) for place in pools.encoder_places]
        self._decoder_nodes = [nodes.get(place, ()) for place in pools.decoder_places]

    def encoder(self, loads: Sequence[Load | None]) -> tuple[int, float] | None:
        """The encoder by index, and its weight; None when all are full. None in `loads` is not available."""
        best: tuple[int, float] | None = None
        for e, load in enumerate(loads):
            if load is None:
                continue
            free = self._slots - load.pending_images if load.free_slots is None else load.free_slots
            if free <= 0:
                continue
            weight = free / SLOTS_PER_DEVICE * (NVLINK_BONUS if self._has_nvlink[e] else 1.0)
            if best is None or weight > best[1]:
                best = (e, weight)
        return best

    def decoder(self, loads: Sequence[Load | None], e: int | None) -> tuple[int, float] | None:
        """The decoder by index, and 1.0 if it is on the encoder's node, else 0.0; None when there is none."""
        available = [d for d, load in enumerate(loads) if load is not None]
        near = [d for d in available if e is not None and self._is_near(e, d)]
        if near:
            return near[0], 1.0
        return (available[0], 0.0) if available else None

    def _is_near(self, e: int, d: int) -> bool:
        one, other = self._encoder_nodes[e], self._decoder_nodes[d]
        return not one or not other or not set(one).isdisjoint(other)
