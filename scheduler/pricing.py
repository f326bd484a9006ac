"""The price of every placement of one request, in seconds.

    price(d, counts) = max(max over encoders e in use of side(e, m) + copy(e, d, m), wait(d)) + tail(d)
    side(e, m)       = waiting for e and encoding m images there, + what the decodes on e's device lose meanwhile
    copy(e, d, m)    = control hop + transfer over the link between them
    wait(d)          = until d has a place and room for the context
    tail(d)          = prefill + decode

Every term grows with the load that it looks at, so more load never makes a replica cheaper. `side` does not depend
on d, nor `wait` and `tail` on e: `bound(d)` is therefore below every price of d, and most decoders need no look at
their encoders at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from operator import add

from scheduler.assignment import Assignment, assign_known
from scheduler.cost import IMAGE_TOKENS
from scheduler.loads import Load, Loads, RequestShape
from scheduler.pools import Pools

STORE_FULL_S = 1000.0
"""Charged for an encoder whose store has no slot left: chosen only when all are full, since it may refuse."""


class Pricing:
    """The prices of one request under given loads. `limit` is how many sequences a decoder may hold."""

    def __init__(self, pools: Pools, shape: RequestShape, loads: Loads, stall_weight: float) -> None:
        self._pools = pools
        self.shape = shape
        self._units = shape.image_units
        self._stall_weight = stall_weight
        self.decoder_loads = _available(pools.decoders, loads.decoders)
        self.encoder_loads: list[Load | None] = []
        self.first_s: list[float] = []  # e -> side(e, 1)
        self.wait_s: list[float] = []  # by d
        self.tail_s: list[float] = []
        self.bounds: list[float] = []
        self._least_side_s = 0.0
        self.holders: dict[bytes, list[int]] = {}  # by key of an image: the encoders that have it
        self._with_images: set[int] = set()  # decoders that have an image of ours
        # By row, for decoders of equal copy prices and images of unknown content: the best assignment, or a bound.
        self._assigned: dict[int, Assignment] = {}
        self.side_bounds: dict[int, float] = {}
        self._least_first_s: float | None = None
        if shape.num_images:
            self.encoder_loads = _available(pools.encoders, loads.encoders)
            self._look_at_encoders()
            self._look_at_caches()
            self._least_side_s = self._find_least_side()

    # -- encoders -----------------------------------------------------------------------------------------

    def _look_at_encoders(self) -> None:
        """Fills `side_s(e, 1)` for all e: the same formula without its calls."""
        units, pools, add_first = self._units, self._pools, self.first_s.append
        for load, sharing, (batch_s, image_s, max_batch) in zip(
            self.encoder_loads, pools.sharing, pools.encode_rates, strict=True
        ):
            if load is None:
                add_first(inf)
                continue
            whole = load.pending_images * units + load.pending_tokens / IMAGE_TOKENS + units
            seconds = batch_s * -(-whole // max_batch) + image_s * whole
            if sharing and (beside := self._running_beside(sharing)):
                seconds += beside * (batch_s * -(-units // max_batch) + image_s * units)
            free = load.free_slots
            add_first(seconds if free is None or free >= 1 else seconds + STORE_FULL_S)

    def _look_at_caches(self) -> None:
        """Fills `holders` and `_with_images`; the first stays empty where the keys say nothing."""
        keys = self.shape.image_keys
        if not keys:
            return
        holders: dict[bytes, list[int]] = {key: [] for key in keys}
        for e, load in enumerate(self.encoder_loads):
            if load is not None and (cached := load.cached):
                for key, found in holders.items():
                    if key in cached:
                        found.append(e)
        for d, load in enumerate(self.decoder_loads):
            if load is not None and (cached := load.cached) and any(key in cached for key in holders):
                self._with_images.add(d)
        if len(holders) < len(keys) or self._with_images or any(holders.values()):
            self.holders = holders

    def _running_beside(self, decoders: list[int]) -> float:
        """The sequences that run on an encoder's device, times the price of a second that one of them waits."""
        loads = [self.decoder_loads[d] for d in decoders]
        return self._stall_weight * sum([load.running for load in loads if load is not None])

    def side_s(self, e: int, num_images: int) -> float:
        """side(e, m): infinite for an encoder that is not available."""
        load = self.encoder_loads[e]
        if load is None:
            return inf
        batch_s, image_s, max_batch = self._pools.encode_rates[e]
        own = num_images * self._units
        whole = load.pending_images * self._units + load.pending_tokens / IMAGE_TOKENS + own
        seconds = batch_s * -(-whole // max_batch) + image_s * whole
        sharing = self._pools.sharing[e]
        if sharing and (beside := self._running_beside(sharing)):
            seconds += beside * (batch_s * -(-own // max_batch) + image_s * own)
        return seconds + STORE_FULL_S if load.free_slots is not None and load.free_slots < num_images else seconds

    def ready_s(self, e: int, num_images: int) -> float:
        """Until encoder `e` has encoded `num_images` of ours: side(e, m) without the price of stalling."""
        load = self.encoder_loads[e]
        if load is None:
            return inf
        queued = load.pending_images * self._units + load.pending_tokens / IMAGE_TOKENS
        return self._encode_s(e, queued + num_images * self._units)

    def stall_s(self, e: int, num_images: int) -> float:
        """What the decodes on the device of `e` lose while it encodes `num_images` of ours."""
        sharing = self._pools.sharing[e]
        if not sharing or num_images == 0:
            return 0.0
        return self._encode_s(e, num_images * self._units) * self._running_beside(sharing)

    def _encode_s(self, e: int, num_images: float) -> float:
        batch_s, image_s, max_batch = self._pools.encode_rates[e]
        return batch_s * -(-num_images // max_batch) + image_s * num_images

    def copy_s(self, e: int, d: int, num_images: int) -> float:
        """copy(e, d, m): the hop is paid for every encode, also where nothing is copied."""
        pools = self._pools
        copied = pools.start_s[d][e] + num_images * self._units * pools.image_s[d][e] if num_images else 0.0
        return pools.hop_s[d] + copied

    def _find_least_side(self) -> float:
        """What no assignment to encoders, whichever the decoder, can undercut."""
        shape = self.shape
        num_new = shape.num_images
        if self.holders:
            num_new = sum([not found for found in self.holders.values()])
        if num_new == 0:
            return min((self.side_s(e, 0) for e in range(len(self.encoder_loads))), default=inf)
        least = min(self.first_s, default=inf)
        if num_new == 1 or self.first_s.count(least) >= num_new:  # an encoder each, at one price
            return least
        return self._spread(list(self.first_s), num_new)

    def _spread(self, following: list[float], num_images: int) -> float:
        """The least that the dearest encoder costs when equal images go, one by one, to the cheapest."""
        counts: dict[int, int] = {}
        for _ in range(num_images - 1):
            e = following.index(min(following))
            counts[e] = count = counts.get(e, 1) + 1
            following[e] = self.side_s(e, count)
        return min(following, default=inf)  # prices that are taken never fall

    # -- decoders -----------------------------------------------------------------------------------------

    def look_at_decoders(self, limit: int, max_sequences: int) -> None:
        """Fills wait, tail and bounds, by d; infinite for one that is gone or full."""
        pools, shape = self._pools, self.shape
        needed, max_tokens, prompt_tokens = shape.total_tokens, shape.max_tokens, shape.prompt_tokens
        least_side, has_images = self._least_side_s, shape.num_images > 0
        is_known = bool(self._with_images) or shape.prefix_key is not None
        least_copy = pools.least_s if self._units == 1.0 else pools.hop_s
        add_wait, add_tail, add_bound = self.wait_s.append, self.tail_s.append, self.bounds.append
        for load, copy_s, hop_s, (step_s, weight_s, context_s, sequence_s, start_s, token_s, squared_s) in zip(
            self.decoder_loads, least_copy, pools.hop_s, pools.decode_rates, strict=True
        ):
            if load is None or (running := load.running) >= limit:
                add_wait(inf)
                add_tail(inf)
                add_bound(inf)
                continue
            read_s = weight_s + (load.pending_tokens + needed) * context_s
            compute_s = (running + 1) * sequence_s
            generate_s = max_tokens * (step_s + (read_s if read_s > compute_s else compute_s))
            wait_s = 0.0 if running < max_sequences else generate_s * (running - max_sequences + 1) / max_sequences
            if (free := load.free_kv_tokens) is not None and free < needed:
                wait_s += generate_s * (needed - free) / needed
            num_tokens = prompt_tokens
            if is_known and (load.cached or load.prefixes):
                num_tokens, num_cached = self._without_cached(load)
                copy_s = hop_s if num_cached else copy_s
            tail_s = start_s + (token_s + squared_s * num_tokens) * num_tokens + generate_s
            add_wait(wait_s)
            add_tail(tail_s)
            if has_images and (side_s := least_side + copy_s) > wait_s:
                add_bound(side_s + tail_s)
            else:
                add_bound(wait_s + tail_s)

    def _without_cached(self, load: Load) -> tuple[int, int]:
        """Prompt tokens that a decoder must still compute, and how many of the images it has."""
        shape = self.shape
        num_cached = sum(key in load.cached for key in shape.image_keys)
        saved = num_cached * shape.image_tokens
        if shape.prefix_key is not None and shape.prefix_key in load.prefixes:
            saved = max(saved, shape.prefix_tokens)
        return max(1, shape.prompt_tokens - saved), num_cached

    def prefill_s(self, d: int) -> float:
        """Of the request on decoder `d`, less what it has cached."""
        load = self.decoder_loads[d]
        num_tokens = self.shape.prompt_tokens if load is None else self._without_cached(load)[0]
        start_s, token_s, squared_s = self._pools.decode_rates[d][-3:]
        return start_s + (token_s + squared_s * num_tokens) * num_tokens

    def price_s(self, d: int, side_s: float) -> float:
        """The whole price on decoder `d` with that encode side (0 without images)."""
        wait_s = self.wait_s[d]
        return (side_s if side_s > wait_s else wait_s) + self.tail_s[d]

    # -- assignments --------------------------------------------------------------------------------------

    def assign(self, d: int, only: Sequence[int] | None = None, without: Sequence[int] = ()) -> Assignment:
        """The images of the request, in order, each to the encoder that is then the cheapest for decoder `d`.

        For equal images the dearest encoder is then as cheap as it can be. `only` and `without` restrict the
        choice; `side_s` is infinite when no encoder is left.
        """
        if only is not None or without or d in self._with_images:
            following = self._following(d)
            if only is not None:
                following = [price if e in only else inf for e, price in enumerate(following)]
            for e in without:
                following[e] = inf
            return self._assign(d, following)
        row = self._pools.row[d]
        found = self._assigned.get(row)
        if found is None:
            found = self._assigned[row] = self._assign(d, self._following(d))
            self.side_bounds[row] = found.side_s
        return found

    def _assign(self, d: int, following: list[float]) -> Assignment:
        return assign_known(self, d, following) if self.holders else self._assign_equal(d, following)

    def _assign_equal(self, d: int, following: list[float]) -> Assignment:
        """`assign` for images of which no cache knows anything."""
        num_images = self.shape.num_images
        counts: dict[int, int] = {}
        prices: dict[int, float] = {}
        order: list[int] = []
        price = min(following, default=inf)
        if num_images > 1 and price < inf and following.count(price) >= num_images:  # an encoder each, at one price
            order = [e for e, each in enumerate(following) if each == price][:num_images]
            return Assignment(
                order, dict.fromkeys(order, 1), dict.fromkeys(order, 1), dict.fromkeys(order, price), price
            )
        for place in range(num_images):
            price = min(following, default=inf)
            if price == inf:
                return Assignment([0] * num_images, {}, {}, {}, inf)
            e = following.index(price)
            order.append(e)
            prices[e] = price
            counts[e] = count = counts.get(e, 0) + 1
            if place + 1 < num_images:
                following[e] = self.side_s(e, count + 1) + self.copy_s(e, d, count + 1)
        # Prices that are taken never fall: the last is the dearest.
        return Assignment(order, counts, counts, prices, price)

    def find_side_bound(self, d: int) -> float:
        """What no assignment for `d` undercuts, by near encoders, the next, and those that have an image.

        Noted in `side_bounds` for all decoders of its row; 0 where a decoder itself has an image.
        """
        bound = 0.0
        if not self._with_images and self._units == 1.0:
            pools, first = self._pools, self.first_s
            if self._least_first_s is None:
                self._least_first_s = min(first)
            near_s = min([first[e] for e in pools.near[d]]) + pools.least_s[d]
            next_s = self._least_first_s + pools.next_s[d]
            new_s = near_s if near_s < next_s else next_s
            bound = 0.0 if self.holders else new_s
            for found in self.holders.values():
                had_s = [self.side_s(e, 0) + self.copy_s(e, d, 1) for e in found]
                bound = max(bound, min([new_s, *had_s]))
        self.side_bounds[self._pools.row[d]] = bound
        return bound

    def _following(self, d: int) -> list[float]:
        """By e: the price of the first image there."""
        if self._units == 1.0:
            return list(map(add, self.first_s, self._pools.one_image_s[d]))
        return [first + self.copy_s(e, d, 1) for e, first in enumerate(self.first_s)]


def _available(names: list[str], loads: Mapping[str, Load]) -> list[Load | None]:
    """By index; None for a replica that is not available."""
    found = map(loads.get, names)
    return [load if load is not None and load.is_available else None for load in found]
