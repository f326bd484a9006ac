"""One real tritonserver for all integration tests, on free ports of 127.0.0.1."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from client import RelayClient
from client.gateway.settings import Settings
from client.shared_memory import KEY_VARIABLE
from launcher.serve import DEFAULT_PROFILE, plan_of, running
from launcher.server import Server
from tests.integration.observe import assert_idle, files_in_shared_memory
from tests.unit.gateway.conftest import Gateway

SHARED_MEMORY_KEY = "a-key-for-tests"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The CPU profile with the shipped checkpoint. At the end it must have nothing in flight and leave nothing."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    plan = plan_of(DEFAULT_PROFILE, None)
    lines: list[str] = []
    variables = {**os.environ, KEY_VARIABLE: SHARED_MEMORY_KEY}
    with (
        log_path.open("w") as log,
        running(plan, ("127.0.0.1", 0, 0, 0), variables, lines.append, log) as started,
    ):
        assert files_in_shared_memory(started) != []
        yield started
        assert_idle(started)
    assert files_in_shared_memory(started) == []
    assert not started.folder.exists()


@pytest.fixture(scope="session")
def running_gateway(server: Server) -> Iterator[Gateway]:
    """One gateway for all tests."""
    metrics_url = f"http://127.0.0.1:{server.ports.metrics}/metrics"
    started = Gateway(Settings(url=f"127.0.0.1:{server.ports.grpc}", metrics_url=metrics_url, gauges_every_s=0.1))
    yield started
    started.close()


@pytest.fixture
def client(server: Server) -> Iterator[RelayClient]:
    """A client of the server; after the test nothing may be in flight."""
    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as connected:
        yield connected
    assert_idle(server)
