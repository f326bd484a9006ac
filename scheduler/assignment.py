"""Which encoder takes which image, where something is known of the images: a cache may have them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from scheduler.loads import Load, RequestShape


class Prices(Protocol):
    """What an assignment asks `scheduler.pricing.Pricing`."""

    shape: RequestShape
    encoder_loads: list[Load | None]
    holders: dict[bytes, list[int]]  # by key of an image: the encoders that have it
    decoder_loads: list[Load | None]

    def side_s(self, e: int, num_images: int) -> float:
        """Price of encoding so many images on encoder `e`."""

    def copy_s(self, e: int, d: int, num_images: int) -> float:
        """Price of bringing so many images from there to decoder `d`."""


@dataclass(slots=True)
class Assignment:
    """Which encoder takes which image, for one decoder; `side_s` is the dearest of them, its copy included."""

    order: list[int]  # per image
    counts: dict[int, int]  # e -> images to encode there
    moved: dict[int, int]  # e -> images to copy from there
    prices: dict[int, float]  # e -> side with copy
    side_s: float
    is_helped: bool = False  # by a cache


def assign_known(prices: Prices, d: int, following: list[float]) -> Assignment:
    """The images of a request with `image_keys`, in order, each to the encoder that is then cheapest for decoder `d`.

    `following` has by e the price of the first image there, and is used up. An image that an encoder has, or is to
    encode for an earlier place of this request, needs no encode there; one that the decoder has is not copied.
    """
    shape, decoder = prices.shape, prices.decoder_loads[d]
    result = Assignment([], {}, {}, {}, 0.0)
    had = decoder.cached if decoder is not None else ()
    placed: dict[bytes, int] = {}
    for key in shape.image_keys:
        is_moved = key not in had
        price = min(following, default=inf)
        e = following.index(price) if following else 0
        hit = _hit(prices, d, key, following, placed, result, is_moved)
        if not is_moved:  # nothing to copy: cheaper by that much, which may be another encoder
            price, e = _cheapest_unmoved(prices, d, following, result)
        if hit is not None and hit[0] <= price:
            price, e = hit
            result.is_helped = True
        else:
            result.counts[e] = result.counts.get(e, 0) + 1
        result.is_helped |= not is_moved
        result.moved[e] = result.moved.get(e, 0) + is_moved
        result.order.append(e)
        result.side_s = max(result.side_s, price)
        result.prices[e] = price
        if price == inf:
            continue
        placed[key] = e
        following[e] = prices.side_s(e, result.counts.get(e, 0) + 1) + prices.copy_s(e, d, result.moved[e] + 1)
    return result


def _cheapest_unmoved(prices: Prices, d: int, following: list[float], result: Assignment) -> tuple[float, int]:
    """The cheapest encoder for an image that need not be copied, and its price."""
    every = [
        inf
        if price == inf
        else prices.side_s(e, result.counts.get(e, 0) + 1) + prices.copy_s(e, d, result.moved.get(e, 0))
        for e, price in enumerate(following)
    ]
    price = min(every, default=inf)
    return price, every.index(price) if every else 0


def _hit(
    prices: Prices,
    d: int,
    key: bytes,
    following: list[float],
    placed: dict[bytes, int],
    result: Assignment,
    is_moved: bool,
) -> tuple[float, int] | None:
    """The cheapest encoder that has the image already, or is to encode it for an earlier place; its price."""
    best: tuple[float, int] | None = None
    earlier = (placed[key],) if key in placed else ()
    for e in sorted({*prices.holders[key], *earlier}):
        if following[e] == inf:
            continue
        moved = result.moved.get(e, 0) + is_moved
        price = prices.side_s(e, result.counts.get(e, 0)) + prices.copy_s(e, d, moved)
        if best is None or price < best[0]:
            best = (price, e)
    return best
