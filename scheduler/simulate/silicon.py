"""Time on a device, which replicas on the same silicon share.

A replica that computes alone goes at full speed. Of several that compute at once each keeps a share, so that a piece
of work of one second may take longer; whenever one begins or ends, the pace of the others changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from scheduler.cost import ContentionCost
from scheduler.simulate.agenda import Agenda

Stage = Literal["encode", "decode", "front"]


class Silicon:
    """Who computes on one device, or on one set of CPUs, and how fast that makes each."""

    def __init__(
        self, contention: ContentionCost, capacity: float = 1.0, stretch: float = 1.0, has_turns: bool = False
    ) -> None:
        self._contention = contention
        self._has_turns = has_turns  # as CPUs: equal ones for whoever computes, and what is lost between them
        self.stretch = stretch  # work takes so many times longer than costs say: others take the rest of the device
        self._capacity = capacity  # replicas that compute at once without slowing each other down
        self.members: list[Work] = []

    def retime(self) -> None:
        """Gives everyone the pace that follows from who is at work."""
        active = [member for member in self.members if member.is_active]
        for member in active:
            member.set_speed(self._speed(member, active))

    def _speed(self, member: Work, active: list[Work]) -> float:
        if len(active) == 1:
            return 1.0
        share = self._contention.encode_speed if member.stage == "encode" else self._contention.decode_speed
        if self._has_turns:
            turn = min(1.0, self._capacity / len(active))
            return turn if member.stage == "front" else turn * 2 * share
        num_same = sum(other.stage == member.stage for other in active)
        return 1.0 / num_same if num_same == len(active) else share / num_same


class Work:
    """What one replica computes: one piece at a time. `done` is called at its end and may begin the next."""

    __slots__ = (
        "_agenda",
        "_at_end",
        "_done",
        "_is_renewed",
        "_is_shared",
        "_left_s",
        "_silicon",
        "_since_s",
        "_speed",
        "_total_s",
        "_version",
        "busy_s",
        "is_active",
        "stage",
        "stretch",
    )

    def __init__(self, agenda: Agenda, silicon: Silicon, stage: Stage, done: Callable[[], None]) -> None:
        self._agenda, self._silicon, self._done = agenda, silicon, done
        self._at_end = self._end  # bound once
        self.stage = stage
        self.is_active = False
        self.busy_s = 0.0  # work done; at full speed a second is a second
        self.stretch = silicon.stretch
        self._is_renewed = False
        self._version = 0
        self._total_s = self._left_s = self._since_s = 0.0
        self._speed = 1.0
        self._is_shared = False
        silicon.members.append(self)
        if len(silicon.members) > 1:
            for member in silicon.members:
                member._is_shared = True

    def begin(self, seconds: float) -> None:
        """Starts a piece of work of so many seconds at full speed. Before: nothing is being done."""
        self._total_s = self._left_s = seconds = seconds * self.stretch
        self._since_s = now_s = self._agenda.now_s
        self._is_renewed = True
        if not self.is_active:  # else the one before has just ended: nothing changes for the others
            self.is_active = True
            self._speed = 1.0
            if self._is_shared:
                self._silicon.retime()
        self._version = version = self._version + 1
        self._agenda.at(now_s + seconds / self._speed, self._at_end, version)

    def elapsed_s(self) -> float:
        """How much of the piece is done, in seconds at full speed."""
        done_s = (self._agenda.now_s - self._since_s) * self._speed
        return (self._total_s - self._left_s + done_s) / self.stretch

    def shorten(self, seconds: float) -> None:
        """Makes the whole piece only so long; not less than `elapsed_s`."""
        self._settle()
        cut_s = self._total_s - seconds * self.stretch
        self._total_s -= cut_s
        self._left_s = max(0.0, self._left_s - cut_s)
        self._schedule()

    def stop(self) -> None:
        """Leaves the piece undone: the replica died."""
        if self.is_active:
            self._settle()
            self.busy_s += self._total_s - self._left_s
            self._version += 1
            self._leave()

    def set_speed(self, speed: float) -> None:
        """Goes on at another pace."""
        if speed != self._speed:
            self._settle()
            self._speed = speed
            self._schedule()

    def _settle(self) -> None:
        now_s = self._agenda.now_s
        self._left_s = max(0.0, self._left_s - (now_s - self._since_s) * self._speed)
        self._since_s = now_s

    def _schedule(self) -> None:
        self._version = version = self._version + 1
        self._agenda.at(self._since_s + self._left_s / self._speed, self._at_end, version)

    def _end(self, version: int) -> None:
        if version != self._version:  # the pace has changed since
            return
        self.busy_s += self._total_s
        self._is_renewed = False
        self._done()
        if not self._is_renewed and self.is_active:
            self._leave()

    def _leave(self) -> None:
        self.is_active = False
        if self._is_shared:
            self._silicon.retime()
