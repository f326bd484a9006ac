"""Places and the waiting room: who is refused, who is next, and how the relay stops."""

from __future__ import annotations

import pytest

from tests.unit.serving.conftest import StartRelay, settle
from tests.unit.serving.fakes import FakeClient, Gate, World

STOPPING = "[UNAVAILABLE] the server is stopping"
FULL = "[UNAVAILABLE] 2 requests are in flight and 2 wait; no room for more; retry after 0.1 s"
SERVED = ["'one' None", "' two' None", "'' stop"]
HELD = ["'one' None", "' two' stop"]


def test_a_full_house_refuses_at_once_and_disturbs_nobody(world: World) -> None:
    held = [world.hold(name) for name in ("a", "b")]
    waiting = [world.ask(name) for name in ("c", "d")]

    refused = [world.ask(name) for name in ("e", "f")]

    assert [client.log for client in refused] == [[FULL], [FULL]]
    for _, gate in held:
        gate.open()
    assert [client.wait() for client, _ in held] == [HELD, HELD]
    assert [client.wait() for client in waiting] == [SERVED, SERVED]


def test_a_place_that_is_free_is_taken_without_a_seat_to_wait(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1, max_waiting=0)
    first, gate = world.hold("first")

    refused = world.ask("refused")
    gate.open()
    first.wait()
    settle()

    assert refused.log == ["[UNAVAILABLE] 1 requests are in flight and 0 wait; no room for more; retry after 0.1 s"]
    assert world.ask("second").wait() == SERVED


def test_the_gauges_say_how_many_are_served_and_wait(world: World) -> None:
    held = [world.hold(name) for name in ("a", "b")]
    world.ask("c")

    assert world.meter.gauges == {"vlm_relay_in_flight_requests": 2, "vlm_relay_waiting_requests": 1}
    assert world.relay.num_in_flight() == 3
    for _, gate in held:
        gate.open()


def order_served(world: World) -> list[str]:
    """The prompts in the order in which they were decoded."""
    return [line.split()[1] for line in world.stages.log if line.startswith("decode")]


def test_the_urgent_one_behind_many_is_next(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1, max_waiting=8)
    _, gate = world.hold("first")
    patient = [world.ask(f"low{n}", priority=5) for n in range(4)]

    urgent = world.ask("high", priority=-1)
    gate.open()

    assert urgent.wait() == SERVED
    assert [client.wait() for client in patient] == [SERVED] * 4
    settle()
    assert order_served(world) == ["first", "high", "low0", "low1", "low2", "low3"]


def test_who_waited_long_enough_goes_before_the_urgent_one(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1, max_waiting=8, ageing_s=10.0)
    _, gate = world.hold("first")
    patient = world.ask("patient", priority=1)

    world.clock.advance(10.1)
    urgent = world.ask("urgent", priority=0)
    gate.open()

    assert [patient.wait(), urgent.wait()] == [SERVED, SERVED]
    settle()
    assert order_served(world) == ["first", "patient", "urgent"]


def test_a_draining_server_refuses_new_requests_and_finishes_the_running(world: World) -> None:
    running, gate = world.hold("running")

    world.is_draining = True
    refused = world.ask("refused")
    gate.open()

    assert refused.log == ["[UNAVAILABLE] the server is stopping and takes no new requests; retry after 5 s"]
    assert running.wait() == HELD


def test_closing_ends_all_and_starts_nobody(start_relay: StartRelay) -> None:
    world = start_relay(max_in_flight=1, max_waiting=8)
    running, gate = world.hold("running")
    waiting = [world.ask(name, b"a", priority=priority) for name, priority in (("w1", 3), ("w2", 2), ("w3", 1))]

    world.relay.close()

    assert running.log == ["'one' None", STOPPING]
    assert [client.log for client in waiting] == [[STOPPING]] * 3
    gate.open()
    settle()
    assert world.relay.num_in_flight() == 0
    assert [line for line in world.stages.log if not line.startswith("cancel")] == ["decode running with [] on d"]


def test_closing_is_not_stopped_by_a_client_that_cannot_be_told(world: World) -> None:
    broken = FakeClient("broken")
    broken.breaks_at = "fail"
    _, broken_gate = world.hold("broken", client=broken)
    other, other_gate = world.hold("other")

    world.relay.close()

    assert other.log == ["'one' None", STOPPING]
    broken_gate.open()
    other_gate.open()


@pytest.mark.parametrize("num_requests", [24])
def test_many_requests_at_once_all_end_and_leave_nothing(start_relay: StartRelay, num_requests: int) -> None:
    world = start_relay(max_in_flight=3, max_waiting=num_requests)
    world.stages.encode_errors[b"4"] = ValueError("a bug")
    gate = world.stages.encode_gates[b"0"] = Gate()

    clients = [world.ask(f"r{n}", f"{n % 6}".encode(), b"x", priority=n % 3) for n in range(num_requests)]
    gate.open()

    ends = [client.wait()[-1] for client in clients]
    assert ends == [
        "[INTERNAL] the scheduler failed: ValueError" if n % 6 == 4 else "'' stop" for n in range(num_requests)
    ]
