"""A request on its way through the simulated server, and each of its images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.ledger import Place
from scheduler.loads import RequestShape
from scheduler.observed import MIN_STEPS, Observed
from scheduler.simulate.outcome import DONE
from scheduler.simulate.sequence import SimulatedSequence

if TYPE_CHECKING:
    from scheduler.simulate.front import Front


class LiveRequest:
    """A request between arrival and end."""

    __slots__ = (
        "attempt",
        "began_s",
        "deadline_s",
        "first_s",
        "front",
        "has_replied",
        "images_left",
        "index",
        "is_ended",
        "is_finished",
        "key",
        "num_given",
        "observed",
        "output_tokens",
        "place",
        "priority",
        "prompt_tokens",
        "sequence",
        "shape",
    )

    def __init__(self, front: Front, index: int, shape: RequestShape, output_tokens: int) -> None:
        self.front = front
        self.index = index
        self.shape = shape
        self.output_tokens = output_tokens
        self.prompt_tokens = shape.prompt_tokens
        self.priority = 0
        self.deadline_s: float | None = None
        self.attempt = 0
        self.began_s = 0.0  # what it waits for now
        self.observed: Observed | None = None  # of this attempt, where the router learns
        self.place: Place | None = None
        self.images_left = 0
        self.sequence: SimulatedSequence | None = None
        self.num_given = 0  # by decoders that died
        self.first_s = -1.0
        self.has_replied = self.is_finished = False  # before the client has got its first token
        self.is_ended = False

    def token(self, sequence: SimulatedSequence) -> None:
        """Its first token on a decoder was given."""
        if self.observed is not None:
            self.observed.prefill_s = self.front.agenda.now_s - self.began_s
            self.began_s = self.front.agenda.now_s
        desk = self.front.desk
        if desk is None or self.has_replied:
            self.first_s = self.front.agenda.now_s if self.first_s < 0 else self.first_s
            return
        self.has_replied = True
        desk.take(desk.cost.reply_s, self._told)

    def _told(self, _: object) -> None:
        """The client has its first token."""
        front = self.front
        self.first_s = front.agenda.now_s
        if self.is_ended:  # cancelled
            return
        if self.is_finished:
            front.end(self, DONE)

    def finished(self, sequence: SimulatedSequence) -> None:
        """Its last token was given."""
        if self.observed is not None and sequence.num_given > MIN_STEPS:
            self.observed.step_s = (self.front.agenda.now_s - self.began_s) / (sequence.num_given - 1)
        if self.first_s < 0:  # and the first is on its way
            self.is_finished = True
        else:
            self.front.end(self, DONE)


class ImageOfRequest:
    """One image of one attempt at an encoder."""

    __slots__ = ("arrived_s", "attempt", "is_cached", "key", "live", "units")

    def __init__(self, live: LiveRequest, attempt: int, key: bytes | None, units: float) -> None:
        self.live = live
        self.attempt = attempt
        self.key = key
        self.units = units
        self.arrived_s = 0.0
        self.is_cached = False

    @property
    def is_wanted(self) -> bool:
        """Whether its request still waits for it."""
        return not self.live.is_ended and self.live.attempt == self.attempt
