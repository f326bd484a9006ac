"""A gateway in front of the real server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from launcher.server import Server
from tests.integration.observe import assert_idle
from tests.unit.gateway.conftest import Gateway


@pytest.fixture
def gateway(running_gateway: Gateway, server: Server) -> Iterator[Gateway]:
    """The gateway; after the test nothing may be in flight, here or on the server."""
    yield running_gateway
    assert running_gateway.is_idle()
    assert_idle(server)


@pytest.fixture
def client_of_openai(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """The openai package's client, without retries."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
