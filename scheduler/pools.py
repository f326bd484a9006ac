"""The replicas of a plan as plain lists, with what never changes between decisions computed once.

Indices: e counts the encoders of the plan, d its decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from scheduler.cost import Costs
from scheduler.plan import Link, Plan, Replica
from scheduler.roofline import CPU, roofline

Column = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

ALL_DEVICES = "*"
STAGES = ("encode", "transfer", "prefill", "decode")


def costs_of(plan: Plan, given: Costs | Mapping[str, Costs] | None = None) -> dict[str, Costs]:
    """The cost functions of every place that the plan's replicas stand on.

    `given` is one for all, or by place, by device or "*"; what it leaves out comes from a roofline.
    """
    by_name = {ALL_DEVICES: given} if isinstance(given, Costs) else dict(given or {})
    models = {device.name: device.model for device in plan.devices}
    found = {}
    for replica in (*plan.encoders, *plan.decoders):
        place = place_of(replica)
        fallback = CPU if replica.device == "cpu" else roofline(models.get(place))
        found[place] = next(
            (by_name[name] for name in (place, replica.device, ALL_DEVICES) if name in by_name), fallback
        )
    return found


def place_of(replica: Replica) -> str:
    """The name of the plan's device that a replica stands on."""
    return replica.place or replica.device


def shares_device(one: Replica, other: Replica) -> bool:
    """Whether two replicas compute on the same silicon: one GPU, or CPU sets that overlap (none is all CPUs)."""
    if one.device != other.device:
        return False
    return one.device != "cpu" or not one.cpus or not other.cpus or not set(one.cpus).isdisjoint(other.cpus)


def link_between(links: Mapping[frozenset[str], Link], one: Replica, other: Replica) -> Link | None:
    """The link between two replicas' devices; None on the same one. A pair that the plan lacks is unknown."""
    if shares_device(one, other):
        return None
    first, second = place_of(one), place_of(other)
    return links.get(frozenset((first, second))) or Link(first=first, second=second, link="unknown")


@dataclass(slots=True)
class Columns:
    """What is fixed, by d, as arrays, or as one number where it is the same for all and is multiplied first."""

    step_s: Column  # of a decode step: its start, and per context token
    context_s: Column | float
    start_s: Column | float  # of a prefill: p0, p1, p2
    token_s: Column | float
    squared_s: Column | float
    hop_s: Column | float
    least_s: Column | float  # hop with a copy of one image from the nearest encoder, and from the next distance
    next_s: Column | float
    nearest: Nearest
    one_image_s: list[Column]  # by e: hop with a copy of one image; and of the copy, start and per image
    copy_start_s: list[Column]
    copy_image_s: list[Column]
    to_all_s: list[Column]  # e -> by d: hop with a copy of one image


@dataclass(slots=True)
class Nearest:
    """Which encoders are nearest to each decoder; decoders with the same ones form a group."""

    encoders: Indices  # of one group after the other
    starts: Indices  # where each group begins
    group: Indices  # by d
    widest: int  # encoders of the largest group
    single: Indices | None  # by d: the one nearest, if every decoder has but one

    @staticmethod
    def of(near: list[tuple[int, ...]]) -> Nearest:
        """From the nearest encoders by d."""
        groups = list(dict.fromkeys(near))
        numbers = {each: number for number, each in enumerate(groups)}
        is_single = all(len(each) == 1 for each in near)
        return Nearest(
            encoders=np.array([e for each in groups for e in each], dtype=np.int64),
            starts=np.cumsum([0, *(len(each) for each in groups)], dtype=np.int64)[:-1],
            group=np.array([numbers[each] for each in near], dtype=np.int64),
            widest=max((len(each) for each in near), default=0),
            single=np.array([each[0] for each in near], dtype=np.int64) if is_single else None,
        )

    def least(self, by_encoder: Column) -> Column:
        """By d: the least of the values of its nearest encoders."""
        if self.single is not None:
            return by_encoder[self.single]
        result: Column = np.minimum.reduceat(by_encoder[self.encoders], self.starts)[self.group]
        return result


class Pools:
    """What is fixed while a plan is served. Read-only, but for `scale`."""

    def __init__(self, plan: Plan, costs: Mapping[str, Costs]) -> None:
        self.plan = plan
        self.encoders = [replica.name for replica in plan.encoders]
        self.decoders = [replica.name for replica in plan.decoders]
        self.encoder_places = [place_of(replica) for replica in plan.encoders]
        self.decoder_places = [place_of(replica) for replica in plan.decoders]
        self._costs = costs
        self.factors = {stage: [1.0] * len(self._names(stage)) for stage in STAGES}
        self.encode_rates = [self._encode_rates(e) for e in range(len(self.encoders))]
        self.decode_rates = [self._decode_rates(d) for d in range(len(self.decoders))]
        self.contention = [costs[place].contention for place in self.decoder_places]
        self.hop_s = [costs[place].transfer.hop_s for place in self.decoder_places]
        self.own: list[list[int]] = [  # d -> the encoders on its own device
            [e for e, encoder in enumerate(plan.encoders) if shares_device(encoder, decoder)]
            for decoder in plan.decoders
        ]
        self.sharing: list[list[int]] = [  # e -> the decoders on its own device
            [d for d in range(len(self.decoders)) if e in self.own[d]] for e in range(len(self.encoders))
        ]
        links = {frozenset((link.first, link.second)): link for link in plan.links}
        self.links = [[link_between(links, encoder, decoder) for encoder in plan.encoders] for decoder in plan.decoders]
        self.link_names = [[link.link if link else "same device" for link in row] for row in self.links]
        # d -> by e: seconds to start a copy, seconds per image, and hop with a copy of one image
        self.start_s: list[list[float]] = [[] for _ in self.decoders]
        self.image_s: list[list[float]] = [[] for _ in self.decoders]
        self.one_image_s: list[list[float]] = [[] for _ in self.decoders]
        self.least_s: list[float] = [0.0] * len(self.decoders)  # d -> the smallest of `one_image_s`
        # d -> the encoders at that price, the next dearer price, and a number that decoders with equal prices share
        self.near: list[tuple[int, ...]] = []
        self.next_s: list[float] = []
        self.row: list[int] = []
        for d in range(len(self.decoders)):
            self._fill_transfer(d)
        self._compare_rows()
        self.columns = self._columns()

    def encode_s(self, e: int, num_images: float) -> float:
        """Until encoder `e`, alone on its device, has encoded so many images of the usual size."""
        batch_s, image_s, max_batch = self.encode_rates[e]
        return batch_s * -(-num_images // max_batch) + image_s * num_images

    def index(self, stage: str, replica: str) -> int:
        """The index of a replica that does `stage`: an encoder for "encode", else a decoder.

        Raises:
            ValueError: no such stage, or no such replica of it.
        """
        names = self._names(stage)
        if stage not in STAGES or replica not in names:
            raise ValueError(f"stage {stage!r} of {replica!r}; allowed: {', '.join(STAGES)} of a replica of the plan")
        return names.index(replica)

    def scale(self, stage: str, index: int, factor: float) -> None:
        """Sets how many times longer than by its cost function a stage of a replica takes."""
        self.factors[stage][index] = factor
        if stage == "encode":
            self.encode_rates[index] = self._encode_rates(index)
        elif stage == "transfer":
            self._fill_transfer(index)
            self._compare_rows()
            self.columns = self._columns()
        else:
            self.decode_rates[index] = self._decode_rates(index)
            columns = self.columns
            columns.step_s = self._rate_column(0)
            columns.context_s, columns.start_s, columns.token_s, columns.squared_s = self._rate_columns()

    def _names(self, stage: str) -> list[str]:
        return self.encoders if stage == "encode" else self.decoders

    def _encode_rates(self, e: int) -> tuple[float, float, int]:
        """Seconds per batch and per image, and images per batch."""
        cost, factor = self._costs[self.encoder_places[e]].encode, self.factors["encode"][e]
        return cost.batch_s * factor, cost.image_s * factor, cost.max_batch

    def _decode_rates(self, d: int) -> tuple[float, ...]:
        """Of a decode step: start, reading the weights, per context token, per sequence; of a prefill p0, p1, p2."""
        costs = self._costs[self.decoder_places[d]]
        decode, prefill = costs.decode, costs.prefill
        slower, later = self.factors["decode"][d], self.factors["prefill"][d]
        return (
            decode.step_s * slower,
            decode.weight_bytes / decode.bytes_per_s * slower,
            decode.kv_bytes_per_token / decode.bytes_per_s * slower,
            decode.flop_per_token / decode.flop_per_s * slower,
            prefill.start_s * later,
            prefill.token_s * later,
            prefill.token_squared_s * later,
        )

    def _fill_transfer(self, d: int) -> None:
        transfer, hop_s = self._costs[self.decoder_places[d]].transfer, self.hop_s[d]
        factor = self.factors["transfer"][d]
        self.start_s[d] = [factor * transfer.start_s(link) for link in self.links[d]]
        self.image_s[d] = [factor * transfer.image_s(link) for link in self.links[d]]
        self.one_image_s[d] = [
            hop_s + (start + image) for start, image in zip(self.start_s[d], self.image_s[d], strict=True)
        ]
        self.least_s[d] = min(self.one_image_s[d], default=0.0)

    def _compare_rows(self) -> None:
        groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        numbers: dict[tuple[float, ...], int] = {}
        self.near, self.next_s, self.row = [], [], []
        for d, prices in enumerate(self.one_image_s):
            least = self.least_s[d]
            group = tuple(e for e, price in enumerate(prices) if price == least)
            self.near.append(groups.setdefault(group, group))
            self.next_s.append(min((price for price in prices if price > least), default=inf))
            row = (self.hop_s[d], *self.start_s[d], *self.image_s[d])
            self.row.append(numbers.setdefault(row, len(numbers)))

    def _columns(self) -> Columns:
        context_s, start_s, token_s, squared_s = self._rate_columns()
        return Columns(
            step_s=self._rate_column(0),
            context_s=context_s,
            start_s=start_s,
            token_s=token_s,
            squared_s=squared_s,
            hop_s=_same_or_all(self.hop_s),
            least_s=_same_or_all(self.least_s),
            next_s=_same_or_all(self.next_s),
            nearest=Nearest.of(self.near),
            one_image_s=[np.array(row) for row in self.one_image_s],
            copy_start_s=[np.array(row) for row in self.start_s],
            copy_image_s=[np.array(row) for row in self.image_s],
            to_all_s=[np.array([row[e] for row in self.one_image_s]) for e in range(len(self.encoders))],
        )

    def _rate_columns(self) -> list[Column | float]:
        return [_same_or_all(self._rate_column(place).tolist()) for place in (2, 4, 5, 6)]

    def _rate_column(self, place: int) -> Column:
        return np.array([rates[place] for rates in self.decode_rates])


def _same_or_all(values: list[float]) -> Column | float:
    """One number where all are equal: what is reckoned with it first is reckoned once."""
    return values[0] if values and values.count(values[0]) == len(values) else np.array(values)
