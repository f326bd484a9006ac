"""The waiting room keeps the order that its rule says, in any sequence of events."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler.admission import WaitingRoom

AGEING_S = 10.0


@dataclass(eq=False)
class Guest:
    """Somebody who waits."""

    name: str
    priority: int = 0
    arrived_s: float = 0.0
    deadline_s: float | None = None
    serial: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        """The rule in its own words: a step of priority is worth `AGEING_S` of waiting; else first come."""
        return (self.priority * AGEING_S + self.arrived_s, self.serial)


def enter(room: WaitingRoom[Guest], guest: Guest) -> Guest:
    """Lets a guest in at his time."""
    room.enter(guest, guest.priority, guest.deadline_s, guest.arrived_s)
    return guest


class NaiveRoom(RuleBasedStateMachine):
    """A room against a plain list, sorted anew at each question."""

    def __init__(self) -> None:
        super().__init__()
        self.room: WaitingRoom[Guest] = WaitingRoom(5, AGEING_S)
        self.guests: list[Guest] = []
        self.now_s = 0.0
        self.serial = 0

    @rule(priority=st.integers(-3, 3), stays_s=st.none() | st.floats(0, 30))
    def someone_enters(self, priority: int, stays_s: float | None) -> None:
        assert self.room.has_room() == (len(self.guests) < 5)
        if not self.room.has_room():
            return
        self.serial += 1
        deadline_s = None if stays_s is None else self.now_s + stays_s
        guest = Guest(str(self.serial), priority, self.now_s, deadline_s, self.serial)
        self.guests.append(enter(self.room, guest))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def one_is_taken(self) -> None:
        wanted = min(self.guests, key=lambda guest: guest.rank, default=None)
        assert self.room.take(0.0) is wanted
        if wanted is not None:
            self.guests.remove(wanted)

    @rule()
    def deadlines_are_kept(self) -> None:
        late = {guest for guest in self.guests if guest.deadline_s is not None and guest.deadline_s <= self.now_s}
        assert set(self.room.expire(self.now_s)) == late
        self.guests = [guest for guest in self.guests if guest not in late]

    @rule(data=st.data())
    def some_go_away(self, data: st.DataObject) -> None:
        leaving = [guest for guest in self.guests if data.draw(st.booleans())]
        stranger = Guest("never here")
        assert set(self.room.remove({id(guest) for guest in [*leaving, stranger]})) == set(leaving)
        self.guests = [guest for guest in self.guests if guest not in leaving]

    @invariant()
    def the_same_wait(self) -> None:
        assert set(self.room.items()) == set(self.guests)
        assert len(self.room) == len(self.guests)


TestAnySequenceOfEvents = NaiveRoom.TestCase
TestAnySequenceOfEvents.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize(
    ("guests", "order"),
    [
        ([Guest("a"), Guest("b"), Guest("c")], "abc"),
        ([Guest("low", 1), Guest("high", -1)], ["high", "low"]),
        ([Guest("old", 1, 0.0), Guest("new", 0, 9.9)], ["new", "old"]),
        ([Guest("old", 1, 0.0), Guest("new", 0, 10.0)], ["old", "new"]),
        ([Guest("last", 100, 0.0), Guest("first", -100, 1999.0)], ["first", "last"]),
        ([Guest("last", 100, 0.0), Guest("first", -100, 2000.1)], ["last", "first"]),
    ],
)
def test_waiting_ageing_s_is_worth_one_step_of_priority(guests: list[Guest], order: list[str]) -> None:
    room: WaitingRoom[Guest] = WaitingRoom(10, AGEING_S)
    for guest in guests:
        enter(room, guest)

    taken = [room.take(0.0) for _ in guests]

    assert [guest.name for guest in taken if guest is not None] == list(order)
    assert room.take(0.0) is None


@pytest.mark.parametrize("last", ["is taken", "leaves"])
def test_passing_through_is_entering_and_being_taken(last: str) -> None:
    waits_s = []
    for passes in (False, True):
        room: WaitingRoom[Guest] = WaitingRoom(10, AGEING_S)
        guests = [enter(room, Guest(name)) for name in "ab"]
        room.take(1.0)
        if last == "is taken":
            room.take(3.0)
        else:
            room.remove({id(guest) for guest in guests})
        if passes:
            room.pass_through(8.0)
        else:
            enter(room, Guest("c"))
            room.take(8.0)
        enter(room, Guest("d"))
        room.take(9.0)
        waits_s.append(room.wait_s(0, 9.0, turn_s=50.0))

    assert waits_s[0] == waits_s[1]
    assert waits_s[0] == (2.0 if last == "is taken" else 7.0)


@pytest.mark.parametrize("leaving", ["a", "ab", "c", "bf", "ad", "abcde"])
def test_who_leaves_does_not_disturb_the_order(leaving: str) -> None:
    room: WaitingRoom[Guest] = WaitingRoom(10, AGEING_S)
    guests = [enter(room, Guest(name, priority)) for name, priority in zip("adfbce", (1, 4, 6, 2, 3, 5), strict=True)]

    room.remove({id(guest) for guest in guests if guest.name in leaving})

    staying = sorted(set("abcdef") - set(leaving))
    assert [guest.name for guest in iter(lambda: room.take(0.0), None)] == staying


def test_nothing_is_kept_of_those_who_left() -> None:
    room: WaitingRoom[Guest] = WaitingRoom(10, AGEING_S)
    enter(room, Guest("urgent", -1))
    gone = [enter(room, Guest("late", 5, deadline_s=1.0)), enter(room, Guest("cancelled", 5))]
    watched = [weakref.ref(guest) for guest in gone]

    room.expire(1.0)
    room.remove({id(gone[1])})
    gone.clear()
    gc.collect()

    assert [each() for each in watched] == [None, None]
    assert len(room) == 1


def emptied_at(times: list[float], num_waiting: int = 20) -> WaitingRoom[Guest]:
    """A room of which one guest left at each of these times."""
    room: WaitingRoom[Guest] = WaitingRoom(100, AGEING_S)
    for n in range(num_waiting):
        enter(room, Guest(f"guest {n}"))
    for now_s in times:
        room.take(now_s)
    return room


def test_a_wait_is_predicted_from_how_fast_the_room_empties() -> None:
    room = emptied_at([0.5 * n for n in range(10)])

    assert len(room) == 10
    assert room.wait_s(0, 5.0) == pytest.approx(11 * 0.5)
    assert room.wait_s(-1, 0.0) == pytest.approx(1 * 0.5)  # more urgent than all


def test_before_enough_have_left_the_predicted_turn_counts() -> None:
    bunch = emptied_at([0.1 * n for n in range(8)])  # 0.7 s are too short a time to know

    assert bunch.wait_s(0, 5.0, turn_s=2.0) == pytest.approx(13 * 2.0)
    assert bunch.refusal(0, 5.0, max_waiting=99, max_wait_s=25.9, turn_s=2.0) is not None
    assert bunch.refusal(0, 5.0, max_waiting=99, max_wait_s=26.1, turn_s=2.0) is None


def test_time_when_nobody_waited_says_nothing_of_the_rate() -> None:
    room = emptied_at([0.5 * n for n in range(10)], num_waiting=10)  # empty at 4.5 s
    for name in "abc":
        enter(room, Guest(name, arrived_s=1000.0))
    room.take(1000.0)

    assert room.wait_s(0, 1000.0) == pytest.approx(3 * 0.5)
