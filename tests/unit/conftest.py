"""What tests of several folders need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.standin.build import build

# Other work shares the CPUs: how long an example takes says nothing.
settings.register_profile("shared_cpus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared_cpus")


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The stand-in for NVIDIA's driver; at the end nothing that was its memory may be left."""
    yield build(tmp_path_factory.mktemp("standin"))
    mine = f"standin_cuda.{os.getpid()}."
    assert [name for name in os.listdir("/dev/shm") if name.startswith(mine)] == []
