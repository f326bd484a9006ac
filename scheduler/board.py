"""Loads as columns: what a price takes from every replica, reckoned again only where a load has changed.

A decision reads whole columns at once and so costs little more on hundreds of replicas than on two.
"""

from __future__ import annotations

from math import inf

import numpy as np

from scheduler.cost import IMAGE_TOKENS
from scheduler.demand import Demand
from scheduler.loads import NOTHING, Load, Loads
from scheduler.pools import Column, Pools

STORE_FULL_S = 1000.0
"""Charged for an encoder whose store has no slot left: chosen only when all are full, since it may refuse."""

USUAL_SHARE = 0.5
"""Of a mean decoder's sequences, how many are reckoned to share what the first decode costs a device's images.

With 0 that first one pays for all, and devices that encode a little stay without decodes: with eight images of 40 ms
on eight GPUs 0.93 of the best fixed choice instead of 0.96. With 1 devices seldom specialise: with one of 640 ms 0.92
instead of 0.99 (`benchmarks.sides`).
"""

MOST_KEPT = 16
"""Columns of encode prices that are kept, by size and number of images; with more, the oldest makes room."""

MOST_CHANGES = 1000
"""Changes of encoders that are remembered; with more, all columns are reckoned anew when they are next asked for."""


class Board:
    """The loads of one server by index: e counts encoders, d decoders. Owned by its router.

    `limit` is how many sequences a decoder may hold, `max_sequences` how many of them run; `follows_demand` is whether
    what encoders were sent counts where they share a device with a decoder.
    """

    __slots__ = (
        "_changes",
        "_counts",
        "_d",
        "_e",
        "_limit",
        "_loads",
        "_max_sequences",
        "_num_running",
        "_running",
        "_sharing",
        "_side_s",
        "_states",
        "beside",
        "caching",
        "compute_s",
        "decoder_loads",
        "demand",
        "encoder_loads",
        "excess",
        "free_tokens",
        "has_excess",
        "has_free_tokens",
        "num_decoders",
        "num_encoders",
        "num_open",
        "ones",
        "pools",
        "read_s",
        "reading",
        "stall_weight",
    )

    def __init__(
        self, pools: Pools, limit: int, max_sequences: int, stall_weight: float, follows_demand: bool = True
    ) -> None:
        num_encoders, num_decoders = len(pools.encoders), len(pools.decoders)
        self.pools = pools
        self.encoder_loads: list[Load | None] = [None] * num_encoders  # None: not available
        self.decoder_loads: list[Load | None] = [None] * num_decoders
        self.num_encoders = self.num_decoders = 0  # available
        # Of a decode step, by d: reading weights and contexts, computing; then how far beyond its batch a decoder is.
        self.read_s = np.full(num_decoders, inf)  # infinite: gone or full
        self.compute_s = np.zeros(num_decoders)
        self.excess = np.zeros(num_decoders)
        self.free_tokens = np.full(num_decoders, inf)  # infinite: not known
        self._running = [0] * num_decoders  # sequences
        self._sharing = np.ones(num_decoders)  # and one more
        self.ones = np.ones(num_decoders)  # numpy takes twice as long for a column and a number as for two columns
        self._num_running = 0  # on all
        self.num_open = 0  # decoders that may take one more
        self.has_excess = self.has_free_tokens = False
        self.beside = [0.0] * num_encoders  # the sequences on its device, times the price of a second that one waits
        self.caching: set[int] = set()  # decoders that may have images, or else beginnings of prompts
        self.reading: set[int] = set()
        self._limit, self._max_sequences, self.stall_weight = limit, max_sequences, stall_weight
        self.demand = Demand(pools, stall_weight) if follows_demand and any(pools.own) else None
        # By size and number of images: a column of prices, and how many of the changes it knows.
        self._side_s: dict[tuple[float, int], tuple[Column, int]] = {}
        self._changes: list[int] = []  # encoders, in the order in which their prices changed
        self._loads: Loads | None = None
        self._e = {name: index for index, name in enumerate(pools.encoders)}
        self._d = {name: index for index, name in enumerate(pools.decoders)}
        # By d: whether it is open, has more than its batch, says what is free; and how many are and do.
        self._states = [(False, False, False)] * num_decoders
        self._counts = [0, 0, 0]

    def follow(self, loads: Loads) -> None:
        """Brings the columns up to date, and empties `loads.changed`; without that, everything is looked at."""
        changed = loads.changed
        if loads is self._loads and changed is not None:
            for name in changed:
                d = self._d.get(name)
                if d is not None:
                    self._look_at_decoder(d, loads)
                elif name in self._e:
                    self._look_at_encoder(self._e[name], loads)
            changed.clear()
            return
        self._loads = loads
        for d in range(len(self.decoder_loads)):
            self._look_at_decoder(d, loads)
            self._note_caches(d, self.decoder_loads[d])
        for e in range(len(self.encoder_loads)):
            self._look_at_encoder(e, loads)
        if changed is not None:
            changed.clear()

    def rates_changed(self, stage: str, index: int) -> None:
        """The pools reckon with another speed of a replica."""
        if stage == "encode":
            self._reckon(index)
        elif self._loads is not None:
            self._look_at_decoder(index, self._loads)

    def sides_s(self, num_images: int, units: float) -> Column:
        """By e: `side_s`. Not to be changed."""
        key, changes = (units, num_images), self._changes
        found = self._side_s.get(key)
        if found is None:
            if len(self._side_s) >= MOST_KEPT:
                del self._side_s[next(iter(self._side_s))]
            values = [self.side_s(e, num_images, units) for e in range(len(self.encoder_loads))]
            found = np.array(values, dtype=np.float64), len(changes)
            self._side_s[key] = found
        column, num_known = found
        if num_known < len(changes):
            for e in set(changes[num_known:]):
                column[e] = self.side_s(e, num_images, units)
            self._side_s[key] = column, len(changes)
        return column

    def side_s(self, e: int, num_images: int, units: float) -> float:
        """Until encoder `e` has encoded so many more images, with the price of stalling; infinite if it is gone."""
        load = self.encoder_loads[e]
        if load is None:
            return inf
        own = num_images * units
        batch_s, image_s, max_batch = self.pools.encode_rates[e]  # `Pools.encode_s`, without the calls
        images = load.pending_images * units + load.pending_tokens / IMAGE_TOKENS + own
        seconds = batch_s * -(-images // max_batch) + image_s * images
        beside = self.beside[e]
        if beside:
            seconds += beside * (batch_s * -(-own // max_batch) + image_s * own)
        return seconds + STORE_FULL_S if load.free_slots is not None and load.free_slots < num_images else seconds

    def sharers(self) -> Column:
        """By d: the sequences that share what its decoding costs the images there, with one that comes."""
        usual = USUAL_SHARE * self._num_running / max(1, self.num_decoders)
        result: Column = np.maximum(self._sharing, 1 + usual)
        return result

    def _look_at_encoder(self, e: int, loads: Loads) -> None:
        load = loads.encoders.get(self.pools.encoders[e])
        if load is not None and not load.is_available:
            load = None
        before = self.encoder_loads[e]
        if load is not before:
            self.num_encoders += (load is not None) - (before is not None)
            self.encoder_loads[e] = load
        self._reckon(e)

    def _reckon(self, e: int) -> None:
        if len(self._changes) >= MOST_CHANGES:
            self._changes.clear()
            self._side_s.clear()
        self._changes.append(e)

    def _look_at_decoder(self, d: int, loads: Loads) -> None:
        load = loads.decoders.get(self.pools.decoders[d])
        if load is not None and not load.is_available:
            load = None
        before = self.decoder_loads[d]
        if load is None or before is None:
            self.num_decoders += (load is not None) - (before is not None)
        self.decoder_loads[d] = load
        running = 0 if load is None else load.running
        self._num_running += running - self._running[d]
        self._running[d], self._sharing[d] = running, running + 1
        is_open = load is not None and running < self._limit
        excess, free_tokens = 0.0, inf
        if load is not None and is_open:
            rates = self.pools.decode_rates[d]
            self.read_s[d] = rates[1] + load.pending_tokens * rates[2]
            self.compute_s[d] = (running + 1) * rates[3]
            over = running - self._max_sequences + 1
            excess = over / self._max_sequences if over > 0 else 0.0
            free_tokens = inf if load.free_kv_tokens is None else load.free_kv_tokens
        else:
            self.read_s[d] = inf
        state, before_state = (is_open, excess > 0, free_tokens < inf), self._states[d]
        if state != before_state:
            for place, (is_new, was) in enumerate(zip(state, before_state, strict=True)):
                self._counts[place] += is_new - was
            self._states[d] = state
            self.num_open, num_excess, num_known = self._counts
            self.has_excess, self.has_free_tokens = num_excess > 0, num_known > 0
        if state[1] or before_state[1]:
            self.excess[d] = excess
        if state[2] or before_state[2]:
            self.free_tokens[d] = free_tokens
        if load is not before:
            self._note_caches(d, load)
        for e in self.pools.own[d]:
            self.beside[e] = self.stall_weight * sum([self._running[other] for other in self.pools.sharing[e]])
            self._reckon(e)

    def _note_caches(self, d: int, load: Load | None) -> None:
        for having, keys in ((self.caching, load and load.cached), (self.reading, load and load.prefixes)):
            if keys is None or keys is NOTHING:
                having.discard(d)
            else:
                having.add(d)

    def holders(self, loads: Loads, keys: tuple[bytes, ...]) -> dict[bytes, list[int]]:
        """By key of an image: the available encoders that have it."""
        found: dict[bytes, list[int]] = {key: [] for key in keys}
        if loads.holders is not None:
            for key, having in found.items():
                names = loads.holders.get(key)
                if names:
                    having += sorted(e for e in map(self._e.__getitem__, names) if self.encoder_loads[e] is not None)
            return found
        for e, load in enumerate(self.encoder_loads):
            if load is not None and (cached := load.cached):
                for key, having in found.items():
                    if key in cached:
                        having.append(e)
        return found
