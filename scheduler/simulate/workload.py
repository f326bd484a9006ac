"""What clients ask for, and when: requests as columns, so that a million of them fit."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from scheduler.cost import IMAGE_TOKENS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class WorkloadRefused(ValueError):
    """A workload that cannot be simulated; the message names what was wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival. Every column has one value per request.

    With `num_users` above 0 it is a closed loop: `arrived_s` does not count, a user asks again `think_s` after the
    last answer.
    """

    arrived_s: Floats
    num_images: Ints
    prompt_tokens: Ints  # those of the images too
    output_tokens: Ints  # that the answer will have
    max_tokens: Ints  # that the client allows, which is all that a decision knows of the answer
    image_keys: Ints | None = None  # of each request's image: equal numbers are equal images; None: all differ
    priority: Ints | None = None
    deadline_s: Floats | None = None  # after the arrival; infinite: none
    cancel_s: Floats | None = None  # when the client leaves, after the arrival; infinite: never
    num_users: int = 0
    think_s: float = 0.0
    image_tokens: int = IMAGE_TOKENS

    def __len__(self) -> int:
        return len(self.arrived_s)

    def checked(self) -> Workload:
        """Itself, if it makes sense.

        Raises:
            WorkloadRefused: empty, columns of different lengths, a value out of range, times that go back.
        """
        if len(self) == 0:
            raise WorkloadRefused("the workload has no requests; at least 1 is needed")
        for field in fields(self):
            column = getattr(self, field.name)
            if isinstance(column, np.ndarray) and len(column) != len(self):
                raise WorkloadRefused(f"{field.name} has {len(column)} values for {len(self)} requests")
        backwards = np.flatnonzero(np.diff(self.arrived_s) < 0)
        if len(backwards):
            at = int(backwards[0]) + 1
            raise WorkloadRefused(
                f"request {at} arrives at {self.arrived_s[at]:g} s, after one at {self.arrived_s[at - 1]:g} s; "
                "times must not go back"
            )
        lowest = {"num_images": 0, "prompt_tokens": 1, "output_tokens": 1, "max_tokens": 1, "arrived_s": 0}
        for name, least in lowest.items():
            column = getattr(self, name)
            bad = np.flatnonzero(~(column >= least) | ~np.isfinite(column))
            if len(bad):
                raise WorkloadRefused(f"request {bad[0]}: {name} is {column[bad[0]]:g}; allowed: {least} or more")
        for name in ("deadline_s", "cancel_s"):
            column = getattr(self, name)
            if column is not None and not (column >= 0).all():
                at = int(np.argmin(column >= 0))
                raise WorkloadRefused(f"request {at}: {name} is {column[at]:g}; allowed: 0 or more")
        return self

    def scaled(self, factor: float) -> Workload:
        """The same requests at `factor` times the rate."""
        return replace(self, arrived_s=self.arrived_s / factor)

    @property
    def rate_per_s(self) -> float:
        """Requests per second from the first arrival to the last; 0 for a closed loop."""
        span_s = float(self.arrived_s[-1] - self.arrived_s[0])
        return (len(self) - 1) / span_s if span_s > 0 and not self.num_users else 0.0


@dataclass(frozen=True, slots=True)
class Mix:
    """What each request of a generated workload is, drawn independently."""

    images: int = 1
    image_share: float = 1.0  # of the requests that carry images
    text_tokens: int = 64  # of the prompt, beside the images
    output_tokens: int = 128
    spread: float = 0.0  # standard deviation of the logarithm of text and output tokens; 0: all alike
    max_tokens: int | None = None  # None: as many as the answer has
    image_tokens: int = IMAGE_TOKENS
    num_distinct: int = 0  # pictures that images are drawn from; 0: no picture comes twice

    def draw(
        self, arrived_s: Floats, chance: np.random.Generator, num_users: int = 0, think_s: float = 0.0
    ) -> Workload:
        """Requests that arrive at those times."""
        count = len(arrived_s)
        has_images = chance.random(count) < self.image_share
        num_images = np.where(has_images, self.images, 0)
        text = _spread(self.text_tokens, self.spread, count, chance)
        output = _spread(self.output_tokens, self.spread, count, chance)
        allowed = output if self.max_tokens is None else np.full(count, self.max_tokens)
        return Workload(
            arrived_s=arrived_s,
            num_images=num_images.astype(np.int64),
            prompt_tokens=text + num_images * self.image_tokens,
            output_tokens=np.minimum(output, allowed),
            max_tokens=allowed,
            image_keys=chance.integers(0, self.num_distinct, count) if self.num_distinct else None,
            num_users=num_users,
            think_s=think_s,
            image_tokens=self.image_tokens,
        ).checked()


def _spread(mean: int, spread: float, count: int, chance: np.random.Generator) -> Ints:
    if spread == 0:
        return np.full(count, mean, dtype=np.int64)
    drawn = mean * np.exp(chance.normal(-spread * spread / 2, spread, count))
    result: Ints = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return result


def poisson(count: int, rate_per_s: float, chance: np.random.Generator) -> Floats:
    """Arrivals that know nothing of each other.

    Raises:
        WorkloadRefused: a rate that is not positive.
    """
    if not (rate_per_s > 0 and np.isfinite(rate_per_s)):
        raise WorkloadRefused(f"rate {rate_per_s:g} per second; allowed: above 0")
    return np.cumsum(chance.exponential(1 / rate_per_s, count))


def bursts(
    count: int,
    rate_per_s: float,
    chance: np.random.Generator,
    peak: float = 9.0,
    share: float = 0.05,
    every_s: float = 60.0,
) -> Floats:
    """Arrivals of that mean rate which, for the `share` of every period, come `peak` times as often as else.

    The default peak is what the image load of a production trace was seen to do against its median.
    """
    if not 0 < share < 1 or peak < 1 or every_s <= 0:
        raise WorkloadRefused(
            f"bursts of {peak:g} times for {share:g} of {every_s:g} s; allowed: 1 or more, between 0 and 1, above 0"
        )
    quiet = rate_per_s / (1 - share + peak * share)
    ticks = poisson(count, 1.0, chance)  # at rate 1, to be stretched so that the rate comes out
    loud = peak * quiet
    in_burst = loud * share * every_s
    in_period = in_burst + quiet * (1 - share) * every_s
    period, rest = np.divmod(ticks, in_period)
    within = np.where(rest < in_burst, rest / loud, share * every_s + (rest - in_burst) / quiet)
    result: Floats = period * every_s + within
    return result


def together(count: int, every_s: float = 0.0) -> Floats:
    """Arrivals at once, or at equal intervals."""
    return np.arange(count) * every_s
