"""Every example runs, and shows what the server answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.perf_binary import find_perf_analyzer
from client import RelayClient
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION
from tests.unit.gateway.conftest import Gateway

pytestmark = pytest.mark.server

EXAMPLES = Path("examples")
CLIENTS = Path("build/clients/bin")
AIPERF = Path("build/aiperf/bin")
GENAI_PERF = Path("build/genai_perf/bin")
needs_clients = pytest.mark.skipif(not (CLIENTS / "../.installed").exists(), reason="no other clients: make clients")
needs_load_tools = pytest.mark.skipif(
    not all((tool / "../.installed").exists() for tool in (AIPERF, GENAI_PERF)), reason="no load tools: make load-tools"
)


def _run(*command: str, variables: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
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
        "langchain_chat.py",
        "litellm_chat.py",
        "notebook.py",
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


@needs_clients
@pytest.mark.parametrize("name", ["langchain_chat.py", "litellm_chat.py"])
def test_other_clients(gateway: Gateway, answer: str, name: str) -> None:
    whole, streamed, counts = _run(str(CLIENTS / "python"), str(EXAMPLES / name), gateway.url).splitlines()

    assert (whole, streamed) == (answer, answer)
    assert counts.endswith("out")


@needs_load_tools
def test_aiperf(gateway: Gateway, tmp_path: Path) -> None:
    num_requests, num_tokens = 8, 6
    options = {
        "model": "llava",
        "url": gateway.url,
        "endpoint-type": "chat",
        "tokenizer": "demo/checkpoint",
        "concurrency": 4,
        "request-count": num_requests,
        "image-width-mean": 336,
        "image-height-mean": 336,
        "synthetic-input-tokens-mean": 20,
        "output-tokens-mean": num_tokens,
        # Special tokens shown: an answer of nothing but them would count as none.
        "extra-inputs": '{"ignore_eos": true, "skip_special_tokens": false}',
        "ui": "none",
        "output-artifact-dir": tmp_path,
    }
    given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]

    _run(str(AIPERF / "aiperf"), "profile", "--streaming", "--use-server-token-count", "--no-gpu-telemetry", *given)

    told = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == num_requests
    assert told["output_sequence_length"]["avg"] == num_tokens
    assert told["error_summary"] == []


@needs_load_tools
def test_genai_perf(gateway: Gateway, tmp_path: Path) -> None:
    num_requests, num_tokens = 8, 6
    analyzer = find_perf_analyzer(os.environ)  # it drives one, and wants it on the PATH
    options = {
        "model": "llava",
        "url": gateway.url,
        "endpoint-type": "multimodal",
        "tokenizer": "demo/checkpoint",
        "concurrency": 4,
        "request-count": num_requests,
        "num-dataset-entries": 4,
        "image-width-mean": 336,
        "image-height-mean": 336,
        "synthetic-input-tokens-mean": 20,
        "output-tokens-mean": num_tokens,
        "artifact-dir": tmp_path,
    }
    given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    given += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "skip_special_tokens:false"]
    variables = {**analyzer.environment, "PATH": f"{analyzer.binary.parent}:{os.environ['PATH']}"}

    _run(str(GENAI_PERF / "genai-perf"), "profile", "--streaming", *given, variables=variables)

    (found,) = tmp_path.rglob("profile_export_genai_perf.json")
    told = json.loads(found.read_text())
    assert told["request_count"]["avg"] == num_requests
    assert told["output_sequence_length"]["avg"] == num_tokens


def test_a_notebook_runs_from_top_to_bottom(server: Server, answer: str) -> None:
    said = _run(sys.executable, str(EXAMPLES / "notebook.py"), f"127.0.0.1:{server.ports.grpc}")

    assert f"answer: {answer.strip()}" in said
    assert "steps: placed, encoded" in said
    assert "placed: " in said
    assert said.count("token ") >= 2


def test_tritonclient_sync(server: Server, answer: str) -> None:
    said = _run(sys.executable, str(EXAMPLES / "tritonclient_sync.py"), f"127.0.0.1:{server.ports.grpc}")

    assert said == f"{answer}\n"


def test_tritonclient_async(server: Server, answer: str) -> None:
    said = _run(sys.executable, str(EXAMPLES / "tritonclient_async.py"), f"127.0.0.1:{server.ports.grpc}")

    assert len(said.splitlines()) == 3
    assert said.splitlines()[0] == f"{QUESTION} {answer.strip()}"
