"""Every example runs, and shows what the server answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from client import RelayClient
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION
from tests.unit.gateway.conftest import Gateway

pytestmark = pytest.mark.server

EXAMPLES = Path("examples")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def answer(server: Server) -> str:
    """What the server answers to the examples' first question."""
    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client:
        return client.ask(QUESTION, images=[PICTURE], max_tokens=20).text


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {
        "README.md",
        "curl.sh",
        "openai_python.py",
        "tritonclient_async.py",
        "tritonclient_sync.py",
    }


def test_curl(gateway: Gateway, answer: str) -> None:
    said = _run(str(EXAMPLES / "curl.sh"), gateway.url)

    *chunks, done = [line.removeprefix("data: ") for line in said.splitlines() if line]
    assert done == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks) == answer


def test_openai_python(gateway: Gateway, answer: str) -> None:
    first, counts, second = _run(sys.executable, str(EXAMPLES / "openai_python.py"), gateway.url).splitlines()

    assert first == answer
    assert "tokens in" in counts
    assert second


def test_tritonclient_sync(server: Server, answer: str) -> None:
    said = _run(sys.executable, str(EXAMPLES / "tritonclient_sync.py"), f"127.0.0.1:{server.ports.grpc}")

    assert said == f"{answer}\n"


def test_tritonclient_async(server: Server, answer: str) -> None:
    said = _run(sys.executable, str(EXAMPLES / "tritonclient_async.py"), f"127.0.0.1:{server.ports.grpc}")

    assert len(said.splitlines()) == 3
    assert said.splitlines()[0] == f"{QUESTION} {answer.strip()}"
