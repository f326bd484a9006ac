"""Plans, costs and loads for tests of the decisions, small enough to reckon by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

from scheduler.board import USUAL_SHARE
from scheduler.cost import Costs, DecodeCost, EncodeCost, PrefillCost, TransferCost
from scheduler.demand import COUNTED_SHARE, MOST_USED
from scheduler.loads import Load, Loads, RequestShape
from scheduler.plan import Device, Link, Plan, Replica
from scheduler.pools import link_between, shares_device
from scheduler.profile import DecodeTable, EncodeTable, LimitsTable, ScheduleTable

EMBEDDING_BYTES = 4_718_592
# GB/s at which one embedding takes 0.3 ms and 2.1 ms: the founding article's figures for NVLink and PCIe.
NVLINK_GIGABYTES_PER_S = EMBEDDING_BYTES / 0.3e-3 / 1e9
PCIE_GIGABYTES_PER_S = EMBEDDING_BYTES / 2.1e-3 / 1e9

COSTS = Costs(
    encode=EncodeCost(batch_s=0.0, image_s=0.0025, max_batch=8),
    prefill=PrefillCost(start_s=0.001, token_s=70e-6),
    decode=DecodeCost(
        step_s=0.0,
        weight_bytes=13e9,
        kv_bytes_per_token=524_288,
        bytes_per_s=2e12,
        flop_per_token=13e9,
        flop_per_s=300e12,
    ),
    transfer=TransferCost(
        hop_s=0.0,
        setup_s=0.0,
        staged_setup_s=0.0,
        gigabytes_per_s={"NV12": NVLINK_GIGABYTES_PER_S, "PIX": PCIE_GIGABYTES_PER_S},
    ),
)
"""An encode takes 2.5 ms, a copy 0.3 or 2.1 ms; no batch, hop or launch costs anything."""


def plan(
    encoders: Sequence[str],
    decoders: Sequence[str],
    links: Mapping[tuple[str, str], str] | str = "NV12",
    numa: Mapping[str, tuple[int, ...]] | None = None,
    decode: DecodeTable | None = None,
    **schedule: object,
) -> Plan:
    """Encoders e0, e1 ... and decoders d0, d1 ... on the devices named; `links` by pair, or one for all."""
    names = list(dict.fromkeys((*encoders, *decoders)))
    pairs = {pair: links if isinstance(links, str) else links.get(pair, "unknown") for pair in combinations(names, 2)}
    return Plan(
        checkpoint="checkpoint",
        artifacts="build",
        encoders=tuple(Replica(name=f"e{index}", device=device) for index, device in enumerate(encoders)),
        decoders=tuple(Replica(name=f"d{index}", device=device) for index, device in enumerate(decoders)),
        encode=EncodeTable(),
        decode=decode or DecodeTable(),
        limits=LimitsTable(),
        schedule=ScheduleTable(**schedule),  # type: ignore[arg-type]
        devices=tuple(
            Device(
                name=name,
                roles=tuple(role for role, side in (("encode", encoders), ("decode", decoders)) if name in side),
                numa_nodes=(numa or {}).get(name, ()),
            )
            for name in names
        ),
        links=tuple(Link(first=first, second=second, link=link) for (first, second), link in pairs.items()),
    )


def loads(placed: Plan, **changed: Load) -> Loads:
    """Idle but for the replicas named."""
    return Loads(
        {each.name: changed.get(each.name, Load()) for each in placed.encoders},
        {each.name: changed.get(each.name, Load()) for each in placed.decoders},
    )


def image_shape(num_images: int = 1, **values: object) -> RequestShape:
    """A request with images and a short question."""
    return RequestShape(num_images, 64 + 576 * num_images, 128, **values)  # type: ignore[arg-type]


def naive_price_s(
    placed: Plan,
    costs: Costs,
    shape: RequestShape,
    now: Loads,
    encoders: Sequence[str],
    decoder: str,
    asked: Mapping[str, float] | None = None,
) -> float:
    """The price of one placement, written down again from the formulas, without any short cut.

    `asked` is the share of its time that each decoder's device was asked to encode, by decoder; None: not followed.
    """
    links = {frozenset((link.first, link.second)): link for link in placed.links}
    by_name = {each.name: each for each in (*placed.encoders, *placed.decoders)}
    load = now.decoders[decoder]
    sides = [0.0]
    for name in set(encoders):
        count = encoders.count(name)
        beside = [
            now.decoders[each.name].running
            for each in placed.decoders
            if shares_device(by_name[name], each) and now.decoders[each.name].is_available
        ]
        pending = now.encoders[name].pending_images
        encode_s = costs.encode.seconds(pending + count)
        stall_s = costs.encode.seconds(count) * sum(beside) * placed.schedule.stall_weight
        copy_s = costs.transfer.seconds(count, link_between(links, by_name[name], by_name[decoder]))
        sides.append(encode_s + stall_s + costs.transfer.hop_s + copy_s)
    step_s = costs.decode.seconds(load.running + 1, load.pending_tokens + shape.total_tokens)
    share = 0.0 if asked is None else asked[decoder]
    contention = costs.contention
    beside = share / contention.encode_speed
    stretch = 1 / (1 - COUNTED_SHARE * min(1.0, beside) * (1 - contention.decode_speed))
    generate_s = shape.max_tokens * step_s * stretch
    batch = placed.decode.max_sequences
    wait_s = generate_s * max(0, load.running - batch + 1) / batch
    if load.free_kv_tokens is not None:
        wait_s += generate_s * max(0, shape.total_tokens - load.free_kv_tokens) / shape.total_tokens
    up = [each for each in now.decoders.values() if each.is_available]
    sharers = max(load.running, USUAL_SHARE * sum(each.running for each in up) / len(up))
    delay = share * (_encodes(beside) / contention.encode_speed - _encodes(share))
    crowding_s = generate_s * delay * placed.schedule.stall_weight / (1 + sharers)
    prefill_s = costs.prefill.seconds(shape.prompt_tokens) * stretch
    return max(*sides, wait_s) + prefill_s + generate_s + crowding_s


def _encodes(used: float) -> float:
    """In encodes, how long an image waits and is encoded where so much of the time is used."""
    used = min(used, MOST_USED)
    return 1 + used / (2 * (1 - used))


def every_placement(placed: Plan, shape: RequestShape, now: Loads) -> list[tuple[tuple[str, ...], str]]:
    """All encoders for all images, and all decoders, of those that are available."""
    encoders = [each.name for each in placed.encoders if now.encoders[each.name].is_available]
    decoders = [each.name for each in placed.decoders if now.decoders[each.name].is_available]
    return [(spread, d) for spread in product(encoders, repeat=shape.num_images) for d in decoders]
