"""How much of its time each shared device is asked to encode, and what that and its decodes take from each other.

With u the share of the last seconds that a device's encoders were sent work for, and s, t the shares of their speed
that encodes and decodes keep beside each other (`ContentionCost`):

    stretch = 1 / (1 - min(1, u / s) * (1 - t) / 2)    how many times longer prefills and decodes are reckoned to take
    delay   = u * (wait(u / s) / s - wait(u))          seconds that images are delayed, per second of decoding there
    wait(u) = 1 + u / 2 / (1 - u)                      in encodes, until an image is done: M/D/1 (Pollaczek, Khinchine)

A device that is asked to encode more than the share s cannot do so beside decodes at all: `delay` is then so large
that decodes keep away while others take them. Without it, requests decode on whatever device is emptiest, which is the
one that encodes, and all images wait behind them.
"""

from __future__ import annotations

from math import exp

import numpy as np

from scheduler.pools import Column, Pools

MEMORY_S = 20.0
"""The time constant of "the last seconds": some answers long, so that one burst makes no device an encoder."""

FIRST_S = 1.0
"""What was sent within the first moment counts as if it had taken so long."""

LEAST_SHARE = 0.01
"""An encoder may be asked at any time: of equal devices, one without an encoder is to decode."""

COUNTED_SHARE = 0.5
"""Of the time that decodes lose beside an encoder. It is their own loss, not that of all: with the whole of it decodes
leave too soon what encodes a little (two GPUs that may both encode one image of 40 ms: 0.78 of always serial instead of
0.85), with none of it they stay too long with what encodes much (eight GPUs, 160 ms: 0.81 of the best split instead of
0.96; `benchmarks.sides`).
"""

STEP_S = 0.02
"""Between two looks; sooner, nothing of note can have changed, and a look costs as much as half a decision."""

MOST_USED = 0.998
"""A queue that would grow for ever is reckoned as one that is used so much: dearer than any wait elsewhere."""


class Demand:
    """What the encoders of each decoder's device were sent. By d; nothing on devices without an encoder.

    Constants are columns too: numpy takes twice as long for a column and a number as for two columns.
    """

    def __init__(self, pools: Pools, stall_weight: float = 1.0) -> None:
        num_decoders = len(pools.decoders)
        self._sharing = pools.sharing
        self._least_share = np.array([LEAST_SHARE if own else 0.0 for own in pools.own])
        self._encode_speed = np.array([each.encode_speed for each in pools.contention])
        self._lost = COUNTED_SHARE * np.array([1 - each.decode_speed for each in pools.contention])
        self._sent_s = np.zeros(num_decoders)  # of encoding, those of longer ago counting less
        self._used = np.zeros((2, num_decoders))  # beside decodes, and alone
        self._most_used = np.full((2, num_decoders), MOST_USED)
        self._ones, self._twos = np.ones((2, num_decoders)), np.full((2, num_decoders), 2.0)
        self._stall_weights = np.full(num_decoders, stall_weight)
        self._began_s: float | None = None
        self._now_s = 0.0
        self.stretch: Column = np.ones(num_decoders)
        self.delay: Column = np.zeros(num_decoders)
        self.delay_price: Column = np.zeros(num_decoders)  # a delayed image is dear as a stalled decode is

    def send(self, e: int, seconds: float) -> None:
        """An encoder is given so much work."""
        for d in self._sharing[e]:
            self._sent_s[d] += seconds

    def look(self, now_s: float) -> None:
        """Brings `stretch` and `delay` up to date, `STEP_S` after the last time at the earliest."""
        if self._began_s is None:
            self._began_s = self._now_s = now_s
        elif now_s - self._now_s < STEP_S:
            return
        self._sent_s *= exp((self._now_s - now_s) / MEMORY_S)
        self._now_s = now_s
        memory_s = MEMORY_S * (1 - exp((self._began_s - now_s - FIRST_S) / MEMORY_S))
        beside, share = used = self._used
        np.divide(self._sent_s, memory_s, out=share)
        np.maximum(share, self._least_share, out=share)
        np.divide(share, self._encode_speed, out=beside)
        ones = self._ones[0]
        lost: Column = np.minimum(beside, ones)
        lost *= self._lost
        self.stretch = ones / (ones - lost)
        capped = np.minimum(used, self._most_used)
        waits = capped / self._twos
        waits /= self._ones - capped
        waits += self._ones  # wait(u)
        delay: Column = waits[0] / self._encode_speed
        delay -= waits[1]
        delay *= share
        self.delay, self.delay_price = delay, delay * self._stall_weights
