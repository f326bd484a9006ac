"""Ports and log lines of a server that is not started here."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.process import _is_noise
from launcher.server import REGION, PortBusy, choose_ports, remove_left_regions
from python_backend.transport.boot import identity

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def test_zero_is_any_free_port() -> None:
    ports = choose_ports(HOST, 0, 0, 0)

    assert ports.host == HOST
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    for port in (ports.http, ports.grpc, ports.metrics):
        with socket.socket() as probe:  # and is free again
            probe.bind((HOST, port))


def test_a_port_that_was_asked_for_is_kept() -> None:
    port = free_port()

    assert choose_ports(HOST, 0, port, 0).grpc == port


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_busy_port_is_named_with_what_to_do(taken: int, place: int) -> None:
    asked = [0, 0, 0]
    asked[place] = taken
    name = ("http", "grpc", "metrics")[place]

    with pytest.raises(PortBusy) as refused:
        choose_ports(HOST, *asked)
    assert str(refused.value) == (
        f"{name} port {taken} on {HOST}: Address already in use; give another with --{name}-port, or 0 for a free one"
    )


def test_one_port_cannot_be_had_twice() -> None:
    port = free_port()

    with pytest.raises(PortBusy, match=f"^metrics port {port} on {HOST}: Address already in use; "):
        choose_ports(HOST, port, 0, port)


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(PortBusy, match=r"^http port 0 on 192\.0\.2\.1: Cannot assign requested address; "):
        choose_ports("192.0.2.1", 0, 0, 0)


@pytest.mark.parametrize(
    ("line", "is_noise"),
    [
        ("W1129 pinned_memory_manager.cc:273] Unable to allocate pinned system memory\n", True),
        ("| Option | Value |\n", True),
        ("+--------+\n", True),
        ("\n", True),
        ("2026-01-01 00:00:00,000 I llava loaded: /checkpoint\n", False),
        ("E1129 model_lifecycle.cc:641] failed to load 'llava'\n", False),
    ],
)
def test_only_noise_is_kept_out_of_the_log(line: str, is_noise: bool) -> None:
    assert _is_noise(line) == is_noise


def test_what_a_killed_launcher_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    start_of_dead = 1
    dead.wait()
    mine = f"{REGION}{identity(os.getpid())}.0a0b0c0d-region"
    for name in (f"{REGION}{dead.pid}-{start_of_dead}-{os.stat('/proc/self/ns/pid').st_ino}.0a0b0c0d-x", mine, "other"):
        (tmp_path / name).touch()

    remove_left_regions(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", mine]
