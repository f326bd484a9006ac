"""A simulated vision encoder: its queue, Triton's dynamic batches, and the embeddings it keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from scheduler.cost import EncodeCost
from scheduler.loads import RecentKeys
from scheduler.simulate.agenda import Agenda
from scheduler.simulate.silicon import Silicon, Work

NoteSpan = Callable[[str, float, int, int, int], None]
"""Takes the replica, when its work began, and the images, sequences and prompt tokens that it was."""


class ImageJob(Protocol):
    """One image of an attempt on its way through an encoder."""

    arrived_s: float  # at the encoder
    units: float  # its size, in images of the usual one
    key: bytes | None  # of its content; None: like no other
    is_cached: bool  # it need not be encoded

    @property
    def is_wanted(self) -> bool:
        """Whether its request still waits for it."""


class SimulatedEncoder:
    """One replica. `deliver`, to be set before the first image, gets every one whose embedding is in the store."""

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        silicon: Silicon,
        cost: EncodeCost,
        batching: tuple[int, float],
        slots: int,
    ) -> None:
        self.name = name
        self.queue: deque[ImageJob] = deque()
        self.work = Work(agenda, silicon, "encode", self._batch_done)
        self.num_encoded = 0
        self.num_cached = 0
        self.num_batches = 0
        self._agenda = agenda
        self._cost = cost
        self._max_batch, self._delay_s = batching  # images, and how long Triton waits for a fuller batch
        self.deliver: Callable[[ImageJob], None] | None = None
        self._kept = RecentKeys(slots)
        self._batch: list[ImageJob] = []
        self._is_alarmed = False
        self._at_alarm = self._alarm  # bound once
        self._began_s = 0.0  # of the batch that is being encoded
        self.is_dead = False
        self.span: NoteSpan | None = None

    def push(self, job: ImageJob) -> None:
        """Queues an image."""
        job.arrived_s = self._agenda.now_s
        self.queue.append(job)
        if not self.work.is_active and not self.is_dead:
            self._begin()

    def die(self) -> list[ImageJob]:
        """Loses its work and its store; those that waited."""
        self.work.stop()
        lost = [*self._batch, *self.queue]
        self._batch = []
        self.queue.clear()
        self._kept.forget()
        return lost

    def _begin(self) -> None:
        """Starts a batch when it is full, or its first image has waited long enough."""
        queue, now_s = self.queue, self._agenda.now_s
        if len(queue) < self._max_batch and self._delay_s > 0:
            due_s = queue[0].arrived_s + self._delay_s
            if due_s > now_s:
                if not self._is_alarmed:
                    self._is_alarmed = True
                    self._agenda.at(due_s, self._at_alarm)
                return
        if len(queue) <= self._max_batch:
            self._batch = list(queue)
            queue.clear()
        else:
            self._batch = [queue.popleft() for _ in range(self._max_batch)]
        units = self._new_units()
        if units == 0:
            self._batch_done()
            return
        self._began_s = now_s
        self.num_batches += 1
        self.work.begin(self._cost.seconds(units))

    def _new_units(self) -> float:
        """What of the batch must be encoded: not what the store has, and equal images once."""
        units = 0.0
        new: set[bytes] = set()
        for job in self._batch:
            key = job.key
            if not job.is_wanted:
                continue
            if key is not None and (key in self._kept or key in new):
                self.num_cached += 1
                job.is_cached = True
                continue
            if key is not None:
                new.add(key)
            units += job.units
            self.num_encoded += 1
        return units

    def _alarm(self, _: object) -> None:
        self._is_alarmed = False
        if self.queue and not self.work.is_active and not self.is_dead:
            self._begin()

    def _batch_done(self) -> None:
        batch, self._batch = self._batch, []
        if self.span is not None:
            self.span(self.name, self._began_s, len(batch), 0, 0)
        deliver, kept = self.deliver, self._kept
        assert deliver is not None
        for job in batch:
            if job.key is not None:
                kept.note((job.key,))
            deliver(job)
        if self.queue:
            self._begin()
