"""Which devices encode and which decode, where the profile leaves it open.

The better arrangement has, in this order: the wider narrowest edge from an encoder to a decoder that it feeds, the
wider edges together, the fewer decoders per encoder on a NUMA node, the fewer NVLink pairs broken (one end used, the
other left over), the lower indices. A decoder that encodes for itself needs no edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb

from scheduler.edges import Edges

MOST_TRIED = 20_000
"""Arrangements tried one by one; with more of them (beyond 16 devices) encoders are chosen one after the other."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of an arrangement. A fixed side is given, the other chosen among `free`."""

    free: tuple[int, ...]
    num_encoders: int
    num_decoders: int
    is_hybrid: bool  # one device may have both roles
    encoders: tuple[int, ...] | None = None
    decoders: tuple[int, ...] | None = None

    def has_room(self) -> bool:
        """Whether there are devices enough."""
        open_encoders = self.num_encoders if self.encoders is None else 0
        open_decoders = self.num_decoders if self.decoders is None else 0
        taken = max(open_encoders, open_decoders) if self.is_hybrid else open_encoders + open_decoders
        return taken <= len(self.free)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Devices by index, ascending unless the profile says otherwise."""

    encoders: tuple[int, ...]
    decoders: tuple[int, ...]


def arrange(edges: Edges, wanted: Wanted) -> Arrangement:
    """The best arrangement. Before: `wanted.has_room()`."""
    tried = _all(wanted) if _num_all(wanted) <= MOST_TRIED else iter((_one_by_one(edges, wanted),))
    best = next(tried)
    best_score = _score(edges, best)
    for arrangement in tried:
        score = _score(edges, arrangement)
        if score > best_score:
            best, best_score = arrangement, score
    return best


def best_feeder(edges: Edges, encoders: tuple[int, ...], decoder: int) -> int | None:
    """The encoder with the widest edge to a decoder, itself first; None without encoders."""
    if decoder in encoders:
        return decoder
    return max(encoders, key=lambda e: edges.weight(e, decoder), default=None)


def _score(edges: Edges, arrangement: Arrangement) -> tuple[float, ...]:
    encoders, decoders = set(arrangement.encoders), set(arrangement.decoders)
    fed = decoders - encoders
    widest = [max(edges.weight(e, d) for e in encoders) for d in fed]
    return (
        min(widest, default=0.0),
        sum(widest),
        -edges.crowding(encoders, fed),
        -edges.num_broken(encoders | decoders),
    )


def _num_all(wanted: Wanted) -> int:
    num_free = len(wanted.free)
    num_encoders = comb(num_free, wanted.num_encoders) if wanted.encoders is None else 1
    left = num_free if wanted.is_hybrid or wanted.encoders is not None else num_free - wanted.num_encoders
    return num_encoders * (comb(left, wanted.num_decoders) if wanted.decoders is None else 1)


def _all(wanted: Wanted) -> Iterator[Arrangement]:
    sides = (wanted.encoders,) if wanted.encoders is not None else combinations(wanted.free, wanted.num_encoders)
    for encoders in sides:
        if wanted.decoders is not None:
            yield Arrangement(encoders, wanted.decoders)
            continue
        left = wanted.free if wanted.is_hybrid else tuple(index for index in wanted.free if index not in encoders)
        yield from (Arrangement(encoders, decoders) for decoders in combinations(left, wanted.num_decoders))


def _one_by_one(edges: Edges, wanted: Wanted) -> Arrangement:
    """Each encoder is the one that helps most all devices that are left; then the best fed of them decode."""
    encoders: tuple[int, ...] = wanted.encoders or ()
    while len(encoders) < wanted.num_encoders:
        left = [index for index in wanted.free if index not in encoders]
        targets = wanted.decoders or tuple(wanted.free)

        def gain(index: int, chosen: tuple[int, ...] = encoders, fed: tuple[int, ...] = targets) -> tuple[float, ...]:
            now = (*chosen, index)
            return _score(edges, Arrangement(now, tuple(d for d in fed if d not in now)))

        encoders = (*encoders, max(left, key=gain))
    if wanted.decoders is not None:
        return Arrangement(tuple(sorted(encoders)), wanted.decoders)
    left = [index for index in wanted.free if wanted.is_hybrid or index not in encoders]
    own = [index for index in left if index in encoders]
    others = [index for index in left if index not in encoders]
    others.sort(key=lambda d: -max(edges.weight(e, d) for e in encoders))
    decoders = [*others, *own][: wanted.num_decoders]
    return Arrangement(tuple(sorted(encoders)), tuple(sorted(decoders)))
