"""The price of every placement of one request, in seconds.

    price(d, counts) = max(max over encoders e in use of side(e, m) + copy(e, d, m), wait(d)) + tail(d)
    side(e, m)       = waiting for e and encoding m images there, + what the decodes on e's device lose meanwhile
    copy(e, d, m)    = control hop + transfer over the link between them
    wait(d)          = until d has a place and room for the context
    tail(d)          = (prefill + decode) * stretch + crowding
    crowding(d)      = what images lose to the answer's decode on d's device, shared with the decodes that run there

Every term grows with the load that it looks at, so more load makes no replica cheaper, but for `crowding`, which more
decodes share. It and `stretch` follow what a device was asked to encode (`scheduler.demand`). Decodes so keep away from
devices that encode much, and images (by the price of stalling, in `side`) from where many decode: with a dear encoder
devices take sides, with a cheap one all do both.

`side` does not depend on d, nor `wait` and `tail` on e: `bounds[d]` is below every price of d, reckoned for all d at
once, and most decoders need no look at their encoders at all. With one image of the usual size that no cache has, it is
the price itself wherever the cheapest encoder is among the nearest or at the next distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from scheduler.assignment import Assignment, assign_known
from scheduler.board import Board
from scheduler.cost import IMAGE_TOKENS
from scheduler.loads import Load, Loads, RequestShape
from scheduler.pools import Column

NOBODY: Column = np.empty(0)


class Pricing:
    """The prices of one request under the loads that `board` follows."""

    __slots__ = (
        "_assigned",
        "_board",
        "_cheapest",
        "_crowding",
        "_first_s",
        "_generate_s",
        "_pools",
        "_units",
        "_with_images",
        "bounds",
        "decoder_loads",
        "encoder_loads",
        "holders",
        "num_encoders",
        "num_open",
        "shape",
        "tail_s",
        "wait_s",
    )

    def __init__(self, board: Board, shape: RequestShape, loads: Loads) -> None:
        self._board, self._pools = board, board.pools
        self.shape = shape
        self._units = shape.image_units
        self.encoder_loads = board.encoder_loads
        self.decoder_loads = board.decoder_loads
        self.num_encoders, self.num_open = board.num_encoders, board.num_open  # available; with room for one more
        self.holders: dict[bytes, list[int]] = {}  # by key of an image: the encoders that have it
        self._with_images: set[int] = set()  # decoders that have an image of ours
        self._assigned: dict[int, Assignment] = {}  # by row: the best for decoders of equal copy prices
        self._first_s, self._cheapest = NOBODY, (-1, inf)  # side(e, 1), and the encoder where it is least
        if shape.num_images:
            self._first_s = board.sides_s(1, self._units)
            self._cheapest = _least(self._first_s)
        if shape.image_keys:
            self._look_at_caches(loads)
        self._look_at_decoders()

    # -- encoders -----------------------------------------------------------------------------------------

    def _look_at_caches(self, loads: Loads) -> None:
        """Fills `holders` and `_with_images`; the first stays empty where the keys say nothing."""
        keys = self.shape.image_keys
        holders = self._board.holders(loads, keys)
        for d in self._board.caching:
            load = self.decoder_loads[d]
            if load is not None and (cached := load.cached) and any(key in cached for key in holders):
                self._with_images.add(d)
        if len(holders) < len(keys) or self._with_images or any(holders.values()):
            self.holders = holders

    def side_s(self, e: int, num_images: int) -> float:
        """side(e, m): infinite for an encoder that is not available."""
        return self._board.side_s(e, num_images, self._units)

    def ready_s(self, e: int, num_images: int) -> float:
        """Until encoder `e` has encoded `num_images` of ours: side(e, m) without the price of stalling."""
        load = self.encoder_loads[e]
        if load is None:
            return inf
        queued = load.pending_images * self._units + load.pending_tokens / IMAGE_TOKENS
        return self._pools.encode_s(e, queued + num_images * self._units)

    def stall_s(self, e: int, num_images: int) -> float:
        """What the decodes on the device of `e` lose while it encodes `num_images` of ours."""
        beside = self._board.beside[e]
        return self._pools.encode_s(e, num_images * self._units) * beside if beside and num_images else 0.0

    def copy_s(self, e: int, d: int, num_images: int) -> float:
        """copy(e, d, m): the hop is paid for every encode, also where nothing is copied."""
        pools = self._pools
        copied = pools.start_s[d][e] + num_images * self._units * pools.image_s[d][e] if num_images else 0.0
        return pools.hop_s[d] + copied

    def _find_least_side(self, num_new: int) -> float:
        """What no assignment to encoders, whichever the decoder, can undercut."""
        if num_new == 0:
            return _least(self._board.sides_s(0, self._units))[1]
        first_s = self._first_s
        e, price = self._cheapest
        if num_new == 1:
            return price
        if np.count_nonzero(first_s == price) >= num_new:  # an encoder each, at one price
            return price
        following = first_s.copy()  # the least that the dearest costs when images go, one by one, to the cheapest
        counts: dict[int, int] = {}
        side_s, units = self._board.side_s, self._units
        for _ in range(num_new - 1):
            counts[e] = count = counts.get(e, 1) + 1
            following[e] = side_s(e, count, units)
            e, price = _least(following)
        return price  # prices that are taken never fall

    # -- decoders -----------------------------------------------------------------------------------------

    def _look_at_decoders(self) -> None:
        """Fills wait, tail and bounds, by d; infinite for one that is gone or full."""
        board, columns, shape, demand = self._board, self._pools.columns, self.shape, self._board.demand
        needed, num_tokens = shape.total_tokens, shape.prompt_tokens
        generate_s: Column = board.read_s + needed * columns.context_s
        np.maximum(generate_s, board.compute_s, out=generate_s)
        generate_s += columns.step_s
        generate_s *= float(shape.max_tokens)
        if demand is not None:
            generate_s *= demand.stretch
            self._crowding: Column = demand.delay_price / board.sharers()
        self._generate_s = generate_s
        self.wait_s: Column | None = None  # nobody waits anywhere
        if board.has_excess or board.has_free_tokens:
            with np.errstate(invalid="ignore"):
                self.wait_s = generate_s * board.excess
                if board.has_free_tokens:
                    self.wait_s += generate_s * np.maximum((needed - board.free_tokens) / needed, 0.0)
            self.wait_s[np.isnan(self.wait_s)] = inf
        prefill_s = columns.start_s + (columns.token_s + columns.squared_s * num_tokens) * num_tokens
        if demand is None:
            tail_s: Column = prefill_s + generate_s
        else:
            tail_s = prefill_s * demand.stretch
            tail_s += generate_s * (self._crowding + board.ones)
        self.tail_s = tail_s
        side_s = self._side_bounds() if shape.num_images else None
        key, having = shape.prefix_key, self._with_images
        if key is not None:
            having = having | {d for d in board.reading if self._has_prefix(d, key)}
        if having:
            self._look_at_caching(having, side_s)
        if side_s is None:
            self.bounds: Column = tail_s if self.wait_s is None else self.wait_s + tail_s
        else:
            if self.wait_s is not None:
                np.maximum(side_s, self.wait_s, out=side_s)
            side_s += tail_s
            self.bounds = side_s

    def _side_bounds(self) -> Column:
        """By d: below the encode side of every assignment."""
        columns, first_s = self._pools.columns, self._first_s
        num_new = self.shape.num_images if not self.holders else sum([not found for found in self.holders.values()])
        least_side_s = self._find_least_side(num_new)
        if self._units != 1.0:
            return np.full(len(self.decoder_loads), least_side_s) + columns.hop_s
        # All new images at the nearest encoders, or one at least at another.
        most = -(-num_new // columns.nearest.widest)
        sides_s = first_s if most <= 1 else self._board.sides_s(most, 1.0)
        bounds_s = columns.nearest.least(sides_s)
        bounds_s += columns.least_s
        np.minimum(bounds_s, self._cheapest[1] + columns.next_s, out=bounds_s)
        if num_new > 1:
            np.maximum(bounds_s, least_side_s + columns.least_s, out=bounds_s)
        return self._with_holders(bounds_s, num_new, least_side_s) if self.holders else bounds_s

    def _with_holders(self, new_s: Column, num_new: int, least_side_s: float) -> Column:
        """The bounds where caches have some of the images; `new_s` for those that are new."""
        columns, first_s = self._pools.columns, self._first_s
        one_s = columns.nearest.least(first_s) + columns.least_s
        np.minimum(one_s, self._cheapest[1] + columns.next_s, out=one_s)
        bounds_s = new_s if num_new else np.full(len(new_s), least_side_s) + columns.hop_s
        for found in self.holders.values():
            if found:
                had_s = one_s
                for e in found:
                    had_s = np.minimum(had_s, self.side_s(e, 0) + columns.to_all_s[e])
                np.maximum(bounds_s, had_s, out=bounds_s)
        return bounds_s

    def _has_prefix(self, d: int, key: bytes) -> bool:
        load = self.decoder_loads[d]
        return load is not None and key in load.prefixes

    def _look_at_caching(self, decoders: set[int], side_s: Column | None) -> None:
        """The tails of decoders that have some of the prompt, and their encode sides without copies."""
        for d in decoders:
            load = self.decoder_loads[d]
            assert load is not None
            num_tokens, num_cached = self._without_cached(load)
            token_s, squared_s = self._pools.decode_rates[d][-2:]
            whole = self.shape.prompt_tokens
            saved_s = (token_s + squared_s * (whole + num_tokens)) * (whole - num_tokens)
            self.tail_s[d] -= saved_s * self._stretch(d)
            if num_cached and side_s is not None:
                num_new = sum([not found for found in self.holders.values()])
                side_s[d] = self._find_least_side(num_new) + self._pools.hop_s[d]

    def _without_cached(self, load: Load) -> tuple[int, int]:
        """Prompt tokens that a decoder must still compute, and how many of the images it has."""
        shape = self.shape
        num_cached = sum([key in load.cached for key in shape.image_keys]) if load.cached else 0
        saved = num_cached * shape.image_tokens
        if shape.prefix_key is not None and shape.prefix_key in load.prefixes:
            saved = max(saved, shape.prefix_tokens)
        return max(1, shape.prompt_tokens - saved), num_cached

    def prefill_s(self, d: int) -> float:
        """Of the request on decoder `d`, less what it has cached."""
        load = self.decoder_loads[d]
        num_tokens = self.shape.prompt_tokens if load is None else self._without_cached(load)[0]
        start_s, token_s, squared_s = self._pools.decode_rates[d][-3:]
        return (start_s + (token_s + squared_s * num_tokens) * num_tokens) * self._stretch(d)

    def _stretch(self, d: int) -> float:
        demand = self._board.demand
        return 1.0 if demand is None else demand.stretch.item(d)

    def waiting_s(self, d: int) -> float:
        """wait(d)."""
        return 0.0 if self.wait_s is None else self.wait_s.item(d)

    def crowding_s(self, d: int) -> float:
        """The part of the price that is no time of ours."""
        return 0.0 if self._board.demand is None else self._generate_s.item(d) * self._crowding.item(d)

    def price_s(self, d: int, side_s: float) -> float:
        """The whole price on decoder `d` with that encode side (0 without images)."""
        wait_s = 0.0 if self.wait_s is None else self.wait_s.item(d)
        return (side_s if side_s > wait_s else wait_s) + self.tail_s.item(d)

    # -- assignments --------------------------------------------------------------------------------------

    def assign(self, d: int, only: Sequence[int] | None = None, without: Sequence[int] = ()) -> Assignment:
        """The images of the request, in order, each to the encoder that is then the cheapest for decoder `d`.

        For equal images the dearest encoder is then as cheap as it can be. `only` and `without` restrict the
        choice; `side_s` is infinite when no encoder is left.
        """
        if only is not None and len(only) == 1 and not self.holders:
            return self._assign_all(d, only[0])
        if only is not None or without or d in self._with_images:
            following = self._following(d)
            if only is not None:
                allowed = following[list(only)]
                following = np.full(len(following), inf)
                following[list(only)] = allowed
            for e in without:
                following[e] = inf
            return self._assign(d, following)
        row = self._pools.row[d]
        found = self._assigned.get(row)
        if found is None:
            found = self._assigned[row] = self._assign(d, self._following(d))
        return found

    def _assign_all(self, d: int, e: int) -> Assignment:
        """Every image to one encoder."""
        num_images = self.shape.num_images
        price = self.side_s(e, num_images) + self.copy_s(e, d, num_images)
        counts = {e: num_images}
        return Assignment([e] * num_images, counts, counts, {e: price}, price)

    def _assign(self, d: int, following: Column) -> Assignment:
        return assign_known(self, d, following.tolist()) if self.holders else self._assign_equal(d, following)

    def _assign_equal(self, d: int, following: Column) -> Assignment:
        """`assign` for images of which no cache knows anything."""
        num_images = self.shape.num_images
        e, price = _least(following)
        if price == inf:
            return Assignment([0] * num_images, {}, {}, {}, inf)
        if num_images == 1:
            counts = {e: 1}
            return Assignment([e], counts, counts, {e: price}, price)
        equal = (following == price).nonzero()[0]
        if len(equal) >= num_images:  # an encoder each, at one price
            order = equal[:num_images].tolist()
            counts = dict.fromkeys(order, 1)
            return Assignment(order, counts, counts, dict.fromkeys(order, price), price)
        side_s, units, copy_s = self._board.side_s, self._units, self.copy_s
        counts, prices, order = {e: 1}, {e: price}, [e]
        for _ in range(num_images - 1):
            count = counts[e] + 1
            following[e] = side_s(e, count, units) + copy_s(e, d, count)
            e, price = _least(following)
            order.append(e)
            prices[e] = price
            counts[e] = counts.get(e, 0) + 1
        # Prices that are taken never fall: the last is the dearest.
        return Assignment(order, counts, counts, prices, price)

    def _following(self, d: int) -> Column:
        """By e: the price of the first image there."""
        columns = self._pools.columns
        copy_s = columns.one_image_s[d]
        if self._units != 1.0:
            copy_s = self._pools.hop_s[d] + (columns.copy_start_s[d] + self._units * columns.copy_image_s[d])
        result: Column = self._first_s + copy_s
        return result


def _least(column: Column) -> tuple[int, float]:
    """The first of the least, and its value."""
    index = int(column.argmin())
    return index, column.item(index)
