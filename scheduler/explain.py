"""A plan for a person: devices, roles, links, and why each was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.plan import Plan
from scheduler.pools import costs_of, place_of
from scheduler.topology.cpu_list import write_list

_TIERS = {
    "device": "encoder and decoder share their device",
    "nvlink": "every decoder is fed over NVLink, or on its own device",
    "switch": "some decoder is fed through a PCIe switch",
    "numa": "some decoder is fed through the CPU of its NUMA node",
    "any": "some decoder is fed across sockets, or over an unknown link",
}


def summary(plan: Plan) -> str:
    """One line per device: its replicas."""
    return "\n".join(_table(_devices(plan)))


def explain(plan: Plan) -> str:
    """Devices with roles and reasons, the links between them, costs and policy."""
    sections = [_table(_devices(plan)), ["Why:", *(f"  {device.name}: {device.why}" for device in plan.devices)]]
    if plan.links:
        sections.append(["Links, estimated GB/s one way:", *(f"  {row}" for row in _links(plan))])
    sections.append([f"Tier: {plan.tier} ({_TIERS.get(plan.tier, 'not known')})"])
    sections.append(_policy(plan))
    if plan.notes:
        sections.append([f"note: {note}" for note in plan.notes])
    return "\n\n".join("\n".join(lines) for lines in sections)


def _devices(plan: Plan) -> list[list[str]]:
    rows = [["DEVICE", "ROLES", "REPLICAS", "CPUS", "NUMA", "MODEL"]]
    for device in plan.devices:
        names = [each.name for each in (*plan.encoders, *plan.decoders) if place_of(each) == device.name]
        rows.append(
            [
                device.name,
                "both" if len(device.roles) == 2 else device.roles[0],
                ", ".join(names),
                write_list(device.cpus) or "-",
                ",".join(str(node) for node in device.numa_nodes) or "-",
                device.model or "-",
            ]
        )
    return rows


def _links(plan: Plan) -> list[str]:
    """One line per kind of link, with its pairs."""
    access = {True: "peer access", False: "through host memory", None: "peer access not known"}
    pairs: dict[tuple[str, str, str], list[str]] = {}
    for link in plan.links:
        rate = "?" if link.gigabytes_per_s is None else f"{link.gigabytes_per_s:g}"
        kind = (link.link, rate, access[False if link.is_staged else link.has_peer_access])
        pairs.setdefault(kind, []).append(f"{link.first} - {link.second}")
    heads = _table([[*kind, f"{len(names)} pair{'s' if len(names) > 1 else ''}:"] for kind, names in pairs.items()])
    lines = []
    for head, names in zip(heads, pairs.values(), strict=True):
        rows = [", ".join(names[start : start + 4]) for start in range(0, len(names), 4)]
        lines += [f"{head} {rows[0]}", *(f"{' ' * len(head)} {row}" for row in rows[1:])]
    return lines


def _policy(plan: Plan) -> list[str]:
    schedule = plan.schedule
    lines = [f"Policy: {schedule.policy}"]
    if schedule.policy == "cost":
        lines[0] += f", hysteresis {schedule.hysteresis:g}, stall weight {schedule.stall_weight:g}"
    costs = costs_of(plan)
    for source in dict.fromkeys(cost.source for cost in costs.values()):
        cost = next(each for each in costs.values() if each.source == source)
        lines.append(
            f"  {source}: encode of 1 image {_ms(cost.encode.seconds(1))}, prefill of 640 tokens "
            f"{_ms(cost.prefill.seconds(640))}, decode step of 1 / 32 sequences "
            f"{_ms(cost.decode.seconds(1, 700))} / {_ms(cost.decode.seconds(32, 32 * 700))}"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
