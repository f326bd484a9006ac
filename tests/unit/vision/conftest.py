"""The demo checkpoint's encoder in float16, exported once, and GPUs of the stand-in driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_backend.checkpoint import CheckpointFacts, read_facts
from python_backend.transport.cuda import CudaDevice, Driver
from python_backend.vision.export import export

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def facts() -> CheckpointFacts:
    return read_facts(ROOT / "demo" / "checkpoint")


@pytest.fixture(scope="session")
def half_graph(facts: CheckpointFacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(facts, tmp_path_factory.mktemp("half"), "float16")


@pytest.fixture
def device(standin_library: Path) -> CudaDevice:
    return Driver.load(str(standin_library)).device(0)
