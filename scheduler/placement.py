"""Joins what is wanted (a profile) with what there is (a topology) into a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from scheduler.account import Feeder, describe_device, find_feeders, notes
from scheduler.arrange import Wanted, arrange
from scheduler.edges import TIERS, Edges, describe_link, link_of
from scheduler.memory import check_memory
from scheduler.plan import DECODER, ENCODER, Link, Plan, Replica
from scheduler.pools import place_of
from scheduler.profile import AUTO, DecodeTable, EncodeTable, Profile
from scheduler.topology import Topology
from scheduler.topology.cpu_list import read_list, write_list


class PlacementRefused(ValueError):
    """A profile that does not fit the machine; the message names key, value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where one replica goes: the plan's device by name, and the CPUs it is bound to."""

    place: str
    cpus: tuple[int, ...] = ()


def place(profile: Profile, topology: Topology | None = None, cpus: frozenset[int] | None = None) -> Plan:
    """The plan of a profile on a machine. `cpus` are those that exist; None: not checked.

    Raises:
        PlacementRefused: it does not fit: too few devices, CPUs or bytes, or links below `topology.strict`.
    """
    topology = topology or Topology(source="none")
    spots = _spots(profile, topology)
    encoders, decoders = (_replicas(model, spots[role]) for model, role in ((ENCODER, "encode"), (DECODER, "decode")))
    _check_cpus(profile, (*encoders, *decoders), cpus)
    _check_runtime(profile, encoders)
    places = list(dict.fromkeys(place_of(replica) for replica in (*encoders, *decoders)))
    places.sort(key=lambda name: (name.split(":")[0], _index(name)))
    links = _links(topology, places)
    plan = Plan(
        checkpoint=profile.model.checkpoint,
        artifacts=profile.model.artifacts,
        encoders=encoders,
        decoders=decoders,
        encode=profile.encode,
        engine=profile.engine,
        decode=profile.decode,
        limits=profile.limits,
        schedule=profile.schedule,
        links=links,
        notes=notes(profile, topology, (*encoders, *decoders)),
    )
    feeders = find_feeders(plan, topology)
    tier = max((feeder.tier for feeder in feeders.values()), key=TIERS.index, default="device")
    _check_tier(profile, feeders, tier)
    devices = tuple(describe_device(profile, topology, name, plan, feeders) for name in places)
    fault = check_memory(profile, devices, plan)
    if fault is not None:
        raise PlacementRefused(fault)
    return plan.model_copy(update={"devices": devices, "tier": tier})


# -- where each replica goes ------------------------------------------------------------------------------


def _spots(profile: Profile, topology: Topology) -> dict[str, list[Spot]]:
    """Per role the spots of its replicas, in order."""
    names = _indexed(profile, topology)
    fixed = {role: _fixed(role, table, names, topology) for role, table in _tables(profile)}
    if any(spots is None for spots in fixed.values()):
        chosen = _chosen(profile, topology, names, fixed)
        fixed = {role: spots if spots is not None else chosen[role] for role, spots in fixed.items()}
    return {role: spots for role, spots in fixed.items() if spots is not None}


def _tables(profile: Profile) -> tuple[tuple[str, EncodeTable | DecodeTable], ...]:
    return (("encode", profile.encode), ("decode", profile.decode))


def _indexed(profile: Profile, topology: Topology) -> list[str]:
    """The names of the topology's devices, by index."""
    kind = "cuda" if profile.topology.stands_for == "gpus" else "set"
    for index, gpu in enumerate(topology.gpus if kind == "set" else ()):
        if not gpu.cpus:
            raise PlacementRefused(f"topology.file: GPU{index} has no whole CPU list, and it is to stand for one")
    return [f"{kind}:{index}" for index in range(topology.num_gpus)]


def _fixed(role: str, table: EncodeTable | DecodeTable, names: list[str], topology: Topology) -> list[Spot] | None:
    """The spots that the profile names; None where it says auto."""
    devices, count = table.devices, table.replicas
    if AUTO in devices:
        if len(devices) > 1:
            raise PlacementRefused(f"{role}.devices: 'auto' stands alone (given {list(devices)})")
        if table.cpus:
            raise PlacementRefused(f"{role}.cpus: for devices = 'cpu', not 'auto'")
        return None
    if len(devices) not in (1, count):
        raise PlacementRefused(
            f"{role}.devices: {len(devices)} given for {count} replicas; allowed: one for all, or one per replica"
        )
    every = devices * count if len(devices) == 1 else devices
    for name in devices:
        is_known = name == "cpu" or name in names or (name.startswith("cuda:") and not names)
        if not is_known:
            there = ", ".join(names) or "none"
            raise PlacementRefused(f"{role}.devices: {name!r} is not there; the topology has: {there}")
    if not table.cpus:
        return [Spot(name, _near_cpus(name, topology)) for name in every]
    if len(table.cpus) != count or set(every) != {"cpu"}:
        raise PlacementRefused(
            f"{role}.cpus: {len(table.cpus)} lists given; allowed: one per replica ({count}), with devices = 'cpu'"
        )
    return [Spot(f"cpu:{text}", _cpu_list(f"{role}.cpus", text)) for text in table.cpus]


def _near_cpus(name: str, topology: Topology) -> tuple[int, ...]:
    """A CPU set's own CPUs; a GPU's replica is not bound."""
    return tuple(sorted(topology.gpus[_index(name)].cpus or ())) if name.startswith("set:") else ()


def _cpu_list(key: str, text: str) -> tuple[int, ...]:
    cpus = read_list(text)
    if not cpus:
        raise PlacementRefused(f"{key}: {text!r} is not a list of CPUs; allowed: ascending, as '0-3,8'")
    return tuple(sorted(cpus))


def _chosen(
    profile: Profile, topology: Topology, names: list[str], fixed: dict[str, list[Spot] | None]
) -> dict[str, list[Spot]]:
    """The spots of the roles that are automatic."""
    given = {role: _given(spots, names) for role, spots in fixed.items()}
    taken = {index for indices in given.values() if indices is not None for index in indices}
    is_hybrid = profile.schedule.hybrid
    wanted = Wanted(
        free=tuple(index for index in range(len(names)) if is_hybrid or index not in taken),
        num_encoders=profile.encode.replicas,
        num_decoders=profile.decode.replicas,
        is_hybrid=is_hybrid,
        encoders=given["encode"],
        decoders=given["decode"],
    )
    if not wanted.has_room():
        open_roles = [role for role, spots in fixed.items() if spots is None]
        keys = " and ".join(f"{role}.replicas = {getattr(profile, role).replicas}" for role in open_roles)
        rule = "one of each role per device" if is_hybrid else "a device each (schedule.hybrid = false)"
        where = f"the topology has {topology.num_gpus} ({topology.source}), {len(wanted.free)} of them free"
        raise PlacementRefused(f"{keys}: automatic placement gives {rule}; {where}")
    found = arrange(Edges(topology), wanted)
    sides = {"encode": found.encoders, "decode": found.decoders}
    return {role: [Spot(names[i], _near_cpus(names[i], topology)) for i in side] for role, side in sides.items()}


def _given(spots: list[Spot] | None, names: list[str]) -> tuple[int, ...] | None:
    """The topology's indices of spots that the profile names."""
    return None if spots is None else tuple(names.index(spot.place) for spot in spots if spot.place in names)


def _replicas(model: str, spots: Sequence[Spot]) -> tuple[Replica, ...]:
    """One keeps the model's own name; several are numbered."""
    names = [model] if len(spots) == 1 else [f"{model}_{index}" for index in range(len(spots))]
    return tuple(
        Replica(
            name=name,
            device=spot.place if spot.place.startswith("cuda:") else "cpu",
            cpus=spot.cpus,
            place="" if spot.place == "cpu" or spot.place.startswith("cuda:") else spot.place,
        )
        for name, spot in zip(names, spots, strict=True)
    )


# -- checks -----------------------------------------------------------------------------------------------


def _check_cpus(profile: Profile, replicas: Sequence[Replica], cpus: frozenset[int] | None) -> None:
    key = "encode.cpus, decode.cpus" if profile.encode.cpus or profile.decode.cpus else "topology.file"
    for replica in replicas:
        missing = set(replica.cpus) - cpus if cpus is not None else set()
        if missing and cpus is not None:
            there = write_list(cpus)
            raise PlacementRefused(
                f"{key}: {replica.name} wants CPU {write_list(missing)}; allowed on this machine: {there}"
            )
    for one, other in combinations(replicas, 2):
        shared = set(one.cpus) & set(other.cpus)
        if shared and set(one.cpus) != set(other.cpus):
            raise PlacementRefused(
                f"{key}: {one.name} ({write_list(one.cpus)}) and {other.name} ({write_list(other.cpus)}) share CPU "
                f"{write_list(shared)}; allowed: the same set, or sets apart"
            )


def _check_runtime(profile: Profile, encoders: Sequence[Replica]) -> None:
    runtime = profile.encode.runtime
    if runtime not in ("tensorrt", "triton"):
        return
    if any(replica.device == "cpu" for replica in encoders):
        raise PlacementRefused(f"encode.runtime: {runtime!r} needs a GPU; on a CPU allowed: 'onnxruntime', 'torch'")
    if profile.encode.dtype != "float16":
        raise PlacementRefused(
            f"encode.dtype: {profile.encode.dtype!r}; allowed with encode.runtime {runtime!r}: 'float16', the engine's"
        )


def _check_tier(profile: Profile, feeders: dict[str, Feeder], tier: str) -> None:
    strict = profile.topology.strict
    if TIERS.index(tier) <= TIERS.index(strict):
        return
    name, worst = next((name, feeder) for name, feeder in feeders.items() if feeder.tier == tier)
    raise PlacementRefused(
        f"topology.strict: {strict!r} is wanted, and the best placement reaches {tier!r}: {worst.encoder} feeds "
        f"{name} over {'an unknown link' if worst.link is None else describe_link(worst.link)}"
    )


def _index(name: str) -> int:
    """The number in a device's name; 0 where there is none."""
    number = name.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def _links(topology: Topology, places: list[str]) -> tuple[Link, ...]:
    known = [name for name in places if name.split(":")[0] in ("cuda", "set") and _index(name) < topology.num_gpus]
    return tuple(link_of(topology, _index(one), _index(other), (one, other)) for one, other in combinations(known, 2))
