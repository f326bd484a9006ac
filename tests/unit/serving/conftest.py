"""A relay among fakes that must end with nothing in flight, and the shipped checkpoint with its encoder."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from python_backend.checkpoint import CheckpointFacts, read_facts
from python_backend.placing import Placing
from python_backend.relay import Relay
from scheduler.loads import NOTHING, Loads
from scheduler.profile import DecodeTable
from tests.unit.serving.fakes import (
    PATIENCE_S,
    CharacterPrompts,
    Clock,
    FakeMeter,
    FakeStages,
    World,
    limits,
    router,
)

ROOT = Path(__file__).resolve().parents[3]
REQUEST_THREAD = re.compile(r"\d+\.\d{6}-\d+\.\d+")

StartRelay = Callable[..., World]


@pytest.fixture
def start_relay() -> Iterator[StartRelay]:
    """Starts relays. At the end each has ended every request once, given all back, and counts no load."""
    started: list[World] = []

    def start(
        encoders: tuple[str, ...] = ("e",),
        decoders: tuple[str, ...] = ("d",),
        decode: DecodeTable | None = None,
        **values: object,
    ) -> World:
        stages, prompts, meter, clock = FakeStages(), CharacterPrompts(), FakeMeter(), Clock()
        relay = Relay(
            stages,
            prompts,  # type: ignore[arg-type]
            Placing(router(encoders, decoders, decode), clock),
            limits(**values),
            meter,
            clock,
            lambda: world.is_draining,
        )
        world = World(relay, stages, prompts, meter, clock)
        started.append(world)
        return world

    yield start
    for world in started:
        settle()
        world.relay.close()
        assert {client.name: client.num_finals for client in world.clients if client.breaks_at is None} == {
            client.name: 1 for client in world.clients if client.breaks_at is None
        }
        assert world.relay.num_in_flight() == 0
        assert world.stages.leases == []
        left = loads(world.relay._placing)
        assert left == router(tuple(left.encoders), tuple(left.decoders)).idle()


@pytest.fixture
def world(start_relay: StartRelay) -> World:
    """A relay with one encoder `e` and one decoder `d`, two places and two seats to wait."""
    return start_relay()


def settle() -> None:
    """Returns once every thread that serves a request has ended, and those that it made room for."""
    while serving := [thread for thread in threading.enumerate() if REQUEST_THREAD.fullmatch(thread.name)]:
        for thread in serving:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} still runs"


def loads(placing: Placing) -> Loads:
    """What is thought that each replica has before it; who is down counts as up, caches as empty."""
    loads = placing.loads
    for load in (*loads.encoders.values(), *loads.decoders.values()):
        load.is_available = True
        load.cached = load.prefixes = NOTHING
    return loads


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the shipped checkpoint."""
    return shutil.copytree(ROOT / "demo" / "checkpoint", tmp_path_factory.mktemp("shipped") / "checkpoint")


@pytest.fixture(scope="session")
def facts(checkpoint: Path) -> CheckpointFacts:
    """What it says about itself."""
    return read_facts(checkpoint)
