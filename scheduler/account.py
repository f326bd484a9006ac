"""What a plan says about itself: who feeds whom over which link, why each device has its roles, what to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.edges import TIERS, Edges, describe_link, tier_of
from scheduler.plan import ENCODER, Device, Link, Plan, Replica
from scheduler.pools import link_between, place_of, shares_device
from scheduler.profile import AUTO, Profile
from scheduler.topology import Topology
from scheduler.topology.cpu_list import write_list

ROLES = ("encode", "decode")


@dataclass(frozen=True, slots=True)
class Feeder:
    """The best encoder for a decoder, the tier of their link, and the link (None on one device)."""

    encoder: str
    tier: str
    link: Link | None


def find_feeders(plan: Plan, topology: Topology) -> dict[str, Feeder]:
    """Per decoder, by name, the encoder that is best for it: by tier, GB/s, NUMA node, then how many it feeds."""
    links = {frozenset((link.first, link.second)): link for link in plan.links}
    found: dict[str, Feeder] = {}
    num_fed = dict.fromkeys((encoder.name for encoder in plan.encoders), 0)
    for decoder in plan.decoders:
        best: tuple[tuple[float, ...], Feeder] | None = None
        for encoder in plan.encoders:
            link = link_between(links, encoder, decoder)
            tier = "device" if link is None else tier_of(link)
            rate = 0.0 if link is None else link.gigabytes_per_s or 0.0
            is_near = not _numa_nodes(topology, encoder).isdisjoint(_numa_nodes(topology, decoder))
            rank = (TIERS.index(tier), -rate, not is_near, num_fed[encoder.name])
            if best is None or rank < best[0]:
                best = (rank, Feeder(encoder.name, tier, link))
        if best is not None:
            found[decoder.name] = best[1]
            num_fed[best[1].encoder] += 1
    return found


def _numa_nodes(topology: Topology, replica: Replica) -> frozenset[int]:
    name = place_of(replica)
    is_listed = name.split(":")[0] in ("cuda", "set") and _index(name) < topology.num_gpus
    return (topology.gpus[_index(name)].numa_nodes or frozenset()) if is_listed else frozenset()


def describe_device(profile: Profile, topology: Topology, name: str, plan: Plan, feeders: dict[str, Feeder]) -> Device:
    """A device of the plan, with its roles and why it has them."""
    here = {
        role: [r for r in side if place_of(r) == name]
        for role, side in zip(ROLES, (plan.encoders, plan.decoders), strict=True)
    }
    index = _index(name)
    is_listed = name.split(":")[0] in ("cuda", "set") and index < topology.num_gpus
    gpu = topology.gpus[index] if is_listed else None
    is_gpu = name.startswith("cuda:")
    replica = (here["encode"] or here["decode"])[0]
    model = (gpu.name if gpu else None) or profile.topology.gpu_name
    return Device(
        name=name,
        roles=tuple(role for role in ("encode", "decode") if here[role]),
        gpu=index if is_gpu else None,
        cpus=tuple(sorted(gpu.cpus or ())) if gpu is not None else replica.cpus,
        numa_nodes=tuple(sorted(gpu.numa_nodes or ())) if gpu is not None else (),
        model=model if is_gpu else None,
        why=_why(profile, plan, name, here, feeders),
    )


def _why(
    profile: Profile,
    plan: Plan,
    name: str,
    here: dict[str, list[Replica]],
    feeders: dict[str, Feeder],
) -> str:
    """One line: who chose it, and over which links it is fed or feeds."""
    parts = []
    for role in ROLES:
        if here[role]:
            is_automatic = AUTO in getattr(profile, role).devices
            parts.append(f"{role}s ({'widest edges' if is_automatic else f'as {role}.devices says'})")
    own = [d.name for d in plan.decoders if any(shares_device(e, d) for e in here["encode"]) and d in here["decode"]]
    if own:
        parts.append(f"feeds {', '.join(own)} on the same device")
    names = {replica.name for replica in here["encode"]}
    fed = [
        f"{decoder} ({describe_link(feeder.link)})"
        for decoder, feeder in feeders.items()
        if feeder.encoder in names and feeder.link is not None
    ]
    if fed:
        parts.append(f"feeds {', '.join(fed)}")
    for decoder in here["decode"]:
        feeder = feeders.get(decoder.name)
        if feeder is not None and feeder.link is not None:
            parts.append(f"{decoder.name} is fed by {feeder.encoder} ({describe_link(feeder.link)})")
    return "; ".join(parts)


def notes(profile: Profile, topology: Topology, replicas: Sequence[Replica]) -> tuple[str, ...]:
    """What a person should know: what the topology could not tell, threads that share CPUs."""
    told = []
    if any(replica.device != "cpu" for replica in replicas):
        told += [f"topology: {warning}" for warning in topology.warnings]
        if topology.num_gpus == 0:
            told.append("topology: no GPU was found; links are unknown, costs are those of the slowest known GPU")
        elif not Edges(topology).are_rates:
            told.append("topology: GB/s are not known without topology.gpu_name; links compare by class")
    bound: dict[tuple[int, ...], int] = {}
    for replica in replicas:
        if replica.cpus:
            threads = profile.encode.threads if replica.name.startswith(ENCODER) else profile.decode.threads
            bound[replica.cpus] = bound.get(replica.cpus, 0) + threads
    told += [
        f"CPU {write_list(cpus)}: {threads} threads share {len(cpus)} CPU{'s' if len(cpus) > 1 else ''}"
        for cpus, threads in bound.items()
        if threads > len(cpus)
    ]
    return tuple(told)


def _index(name: str) -> int:
    number = name.partition(":")[2]
    return int(number) if number.isdecimal() else 0
