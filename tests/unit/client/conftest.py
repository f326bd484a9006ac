"""A scripted Triton for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.client.scripted import ScriptedServer, running


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A running scripted server; at the end of the test no call may be open."""
    with running(ScriptedServer()) as scripted:
        yield scripted
