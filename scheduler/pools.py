"""The replicas of a plan as plain lists, with what never changes between decisions computed once.

Indices: e counts the encoders of the plan, d its decoders.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.cost import Costs
from scheduler.plan import Link, Plan, Replica
from scheduler.roofline import CPU, roofline

ALL_DEVICES = "*"


def costs_of(plan: Plan, given: Costs | Mapping[str, Costs] | None = None) -> dict[str, Costs]:
    """The cost functions of every place that the plan's replicas stand on.

    `given` is one for all, or by place, by device or "*"; what it leaves out comes from a roofline.
    """
    by_name = {ALL_DEVICES: given} if isinstance(given, Costs) else dict(given or {})
    models = {device.name: device.model for device in plan.devices}
    found = {}
    for replica in (*plan.encoders, *plan.decoders):
        place = place_of(replica)
        fallback = CPU if replica.device == "cpu" else roofline(models.get(place))
        found[place] = next(
            (by_name[name] for name in (place, replica.device, ALL_DEVICES) if name in by_name), fallback
        )
    return found


def place_of(replica: Replica) -> str:
    """The name of the plan's device that a replica stands on."""
    return replica.place or replica.device


def shares_device(one: Replica, other: Replica) -> bool:
    """Whether two replicas compute on the same silicon: one GPU, or CPU sets that overlap (none is all CPUs)."""
    if one.device != other.device:
        return False
    return one.device != "cpu" or not one.cpus or not other.cpus or not set(one.cpus).isdisjoint(other.cpus)


def link_between(links: Mapping[frozenset[str], Link], one: Replica, other: Replica) -> Link | None:
    """The link between two replicas' devices; None on the same one. A pair that the plan lacks is unknown."""
    if shares_device(one, other):
        return None
    first, second = place_of(one), place_of(other)
    return links.get(frozenset((first, second))) or Link(first=first, second=second, link="unknown")


def _rates(costs: Costs) -> tuple[float, ...]:
    """Of a decode step: start, reading the weights, per context token, per sequence; of a prefill p0, p1, p2."""
    decode, prefill = costs.decode, costs.prefill
    return (
        decode.step_s,
        decode.weight_bytes / decode.bytes_per_s,
        decode.kv_bytes_per_token / decode.bytes_per_s,
        decode.flop_per_token / decode.flop_per_s,
        prefill.start_s,
        prefill.token_s,
        prefill.token_squared_s,
    )


class Pools:
    """What is fixed while a plan is served. Read-only, but for `scale_transfer`."""

    def __init__(self, plan: Plan, costs: Mapping[str, Costs]) -> None:
        self.plan = plan
        self.encoders = [replica.name for replica in plan.encoders]
        self.decoders = [replica.name for replica in plan.decoders]
        self.encoder_places = [place_of(replica) for replica in plan.encoders]
        self.decoder_places = [place_of(replica) for replica in plan.decoders]
        self.encode = [costs[place].encode for place in self.encoder_places]
        self.decode = [costs[place].decode for place in self.decoder_places]
        self.encode_rates = [(cost.batch_s, cost.image_s, cost.max_batch) for cost in self.encode]
        self.decode_rates = [_rates(costs[place]) for place in self.decoder_places]
        self.hop_s = [costs[place].transfer.hop_s for place in self.decoder_places]
        self.own: list[list[int]] = [  # d -> the encoders on its own device
            [e for e, encoder in enumerate(plan.encoders) if shares_device(encoder, decoder)]
            for decoder in plan.decoders
        ]
        self.sharing: list[list[int]] = [  # e -> the decoders on its own device
            [d for d in range(len(self.decoders)) if e in self.own[d]] for e in range(len(self.encoders))
        ]
        links = {frozenset((link.first, link.second)): link for link in plan.links}
        self.links = [[link_between(links, encoder, decoder) for encoder in plan.encoders] for decoder in plan.decoders]
        self._transfer = [costs[place].transfer for place in self.decoder_places]
        self.factors = [1.0] * len(self.decoders)
        # d -> by e: seconds to start a copy, seconds per image, and hop with a copy of one image
        self.start_s: list[list[float]] = [[] for _ in self.decoders]
        self.image_s: list[list[float]] = [[] for _ in self.decoders]
        self.one_image_s: list[list[float]] = [[] for _ in self.decoders]
        self.least_s: list[float] = [0.0] * len(self.decoders)  # d -> the smallest of `one_image_s`
        for d in range(len(self.decoders)):
            self.scale_transfer(d, 1.0)

    def scale_transfer(self, d: int, factor: float) -> None:
        """Sets how many times longer than by its cost function a copy to decoder `d` takes."""
        transfer, hop_s = self._transfer[d], self.hop_s[d]
        self.factors[d] = factor
        self.start_s[d] = [factor * transfer.start_s(link) for link in self.links[d]]
        self.image_s[d] = [factor * transfer.image_s(link) for link in self.links[d]]
        self.one_image_s[d] = [
            hop_s + (start + image) for start, image in zip(self.start_s[d], self.image_s[d], strict=True)
        ]
        self.least_s[d] = min(self.one_image_s[d], default=0.0)
