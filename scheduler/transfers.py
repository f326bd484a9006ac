"""What was measured of the ways that embeddings take, written into a plan."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.plan import Link, Plan, Transfer

GPU = "cuda:"


def pairs(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The devices of encoder and decoder, each pair once, where both are GPUs; a GPU with itself is one too."""
    encoders = dict.fromkeys(replica.device for replica in plan.encoders)
    decoders = dict.fromkeys(replica.device for replica in plan.decoders)
    return tuple((one, other) for one in encoders for other in decoders if _are_gpus(one, other))


def with_transfers(plan: Plan, transfers: Sequence[Transfer]) -> Plan:
    """The plan with these transfers, and its links as they were measured, which is what routing is priced by.

    A pair measured in both directions has the slower one's rate.
    """
    links = {frozenset((link.first, link.second)): link for link in plan.links}
    for transfer in transfers:
        pair = frozenset((transfer.encoder, transfer.decoder))
        if len(pair) == 1:
            continue
        link = links.get(pair) or Link(first=transfer.encoder, second=transfer.decoder, link="unknown")
        rates = [rate for rate in (link.measured_gigabytes_per_s, transfer.gigabytes_per_s) if rate is not None]
        links[pair] = link.model_copy(
            update={
                "has_peer_access": transfer.route == "peer",
                "measured_gigabytes_per_s": min(rates) if rates else None,
            }
        )
    return plan.model_copy(update={"links": tuple(links.values()), "transfers": tuple(transfers)})


def describe_transfer(transfer: Transfer) -> str:
    """One line for a log: `cuda:0 to cuda:1: peer, 240 GB/s`."""
    rate = "" if transfer.gigabytes_per_s is None else f", {transfer.gigabytes_per_s:.3g} GB/s"
    why = f" ({transfer.why})" if transfer.why else ""
    return f"embeddings {transfer.encoder} to {transfer.decoder}: {_WORDS[transfer.route]}{rate}{why}"


_WORDS = {
    "device": "in the GPU's memory",
    "peer": "from the peer's memory",
    "staged": "through pinned host memory",
}


def _are_gpus(*names: str) -> bool:
    return all(name.startswith(GPU) for name in names)
