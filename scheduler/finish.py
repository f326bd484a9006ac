"""Policy `cost`: encoders, decoder and mode by the least predicted finish, with the price of stalling others."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from scheduler.assignment import Assignment
from scheduler.decision import CACHED, FAN_OUT, FINISH, ONLY, STICKY, TEXT, Alternative, Mode
from scheduler.pools import Pools
from scheduler.pricing import Pricing


@dataclass(slots=True)
class Choice:
    """What a policy chose, by index. `assignment` is None without images."""

    d: int
    assignment: Assignment | None
    mode: Mode
    reason_kind: str
    alternative: Alternative | None = None


def least_finish(pricing: Pricing, has_images: bool) -> tuple[int, Assignment | None]:
    """The decoder with the least price, the first of equals, and its encoders; the decoder is -1 if all are full.

    Decoders are looked at in the order of their bounds, only while a bound is below the best price so far.
    """
    bounds = pricing.bounds
    d = int(bounds.argmin())
    least = bounds.item(d)
    if least == inf:
        return -1, None
    if not has_images:
        return d, None
    best, best_d = pricing.assign(d), d
    best_s = pricing.price_s(d, best.side_s)
    if best_s == least:  # the others' bounds are higher, or they come later
        return best_d, best
    candidates = (bounds <= best_s).nonzero()[0]
    for d in candidates[bounds[candidates].argsort(kind="stable")].tolist():
        bound = bounds.item(d)
        if bound > best_s:
            break
        if bound == best_s and d > best_d:
            continue
        found = pricing.assign(d)
        price_s = pricing.price_s(d, found.side_s)
        if price_s < best_s or (price_s == best_s and d < best_d):
            best, best_d, best_s = found, d, price_s
    return best_d, best


def choose(
    pools: Pools, pricing: Pricing, has_images: bool, modes: dict[str, Mode], hysteresis: float, explains: bool = True
) -> Choice:
    """The cost policy's choice.

    `modes` has the last mode by decoder device and is brought up to date: a mode is left only when the other
    one's encode side is cheaper by more than the share `hysteresis` of it. Without `explains` the alternative is not
    looked for where it cannot be kept.
    """
    d, assignment = least_finish(pricing, has_images)
    if assignment is None or d < 0:
        return Choice(d, None, "text", TEXT)
    place = pools.decoder_places[d]
    mode = _mode(pools, d, assignment)
    other_mode: Mode = "split" if mode == "serial" else "serial"
    was_other = modes.get(place) == other_mode
    other = _restricted(pools, pricing, d, other_mode) if explains or was_other else None
    is_kept = other is not None and was_other and other.side_s <= assignment.side_s * (1 + hysteresis)
    if is_kept and other is not None:
        assignment, other, mode, other_mode = other, assignment, other_mode, mode
    modes[place] = mode
    alternative = None
    if other is not None:
        alternative = Alternative(other_mode, pools.encoder_places[other.order[0]], other.side_s)
    return Choice(d, assignment, mode, _reason(pricing, assignment, is_kept), alternative)


def choose_mode(pools: Pools, pricing: Pricing, mode: Mode) -> Choice:
    """The least finish with every image encoded on the decoder's own device ("serial"), or none of them ("split")."""
    best_d, best, best_s = -1, None, inf
    for d, bound in enumerate(pricing.bounds.tolist()):
        own = pools.own[d]
        if bound >= best_s or (mode == "serial" and not own):
            continue
        found = pricing.assign(d, only=own) if mode == "serial" else pricing.assign(d, without=own)
        price_s = pricing.price_s(d, found.side_s)
        if price_s < best_s:
            best_d, best, best_s = d, found, price_s
    return Choice(best_d, best, mode, FINISH)


def _mode(pools: Pools, d: int, assignment: Assignment) -> Mode:
    own = pools.own[d]
    return "serial" if own and set(own).issuperset(assignment.order) else "split"


def _restricted(pools: Pools, pricing: Pricing, d: int, mode: Mode) -> Assignment | None:
    """The best assignment of a mode on decoder `d`; None where the mode is not possible."""
    own = pools.own[d]
    if not own or (mode == "split" and len(own) == len(pools.encoders)):
        return None
    found = pricing.assign(d, only=own) if mode == "serial" else pricing.assign(d, without=own)
    return found if found.side_s < inf else None


def _reason(pricing: Pricing, assignment: Assignment, is_kept: bool) -> str:
    if is_kept:
        return STICKY
    if assignment.is_helped:
        return CACHED
    if len(set(assignment.order)) > 1:
        return FAN_OUT
    return ONLY if pricing.num_encoders == pricing.num_open == 1 else FINISH
