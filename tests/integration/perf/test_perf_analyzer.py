"""Triton's own load generator against the server: it completes, and what it exports makes sense."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.make_inputs import INPUTS
from benchmarks.perf_analyzer import measure
from benchmarks.perf_binary import NetworkAbsent, PerfAnalyzer, find_perf_analyzer
from launcher.server import Server
from tests.unit.gateway.conftest import Gateway

pytestmark = pytest.mark.server

NUM_REQUESTS = 10
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def analyzer() -> PerfAnalyzer:
    try:
        return find_perf_analyzer(os.environ)
    except NetworkAbsent as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("triton", "llava_stream.json"),
        ("triton", "llava_text_stream.json"),
        ("triton", "llava_decision.json"),
        ("openai", "openai_stream.json"),
    ],
)
def test_perf_analyzer_completes_a_run_without_errors(
    server: Server, running_gateway: Gateway, analyzer: PerfAnalyzer, tmp_path: Path, kind: str, name: str
) -> None:
    url = running_gateway.url if kind == "openai" else f"{server.ports.host}:{server.ports.grpc}"

    levels = measure(analyzer, url, INPUTS / name, NUM_REQUESTS, "2", tmp_path / "profile.json", TIMEOUT_S, kind)

    assert [(level.concurrency, level.num_without_text) for level in levels] == [(2, 0)]
    [level] = levels
    assert level.num_requests >= NUM_REQUESTS
    assert 0 < level.ttft_p50_ms <= level.latency_p50_ms
    assert level.responses_per_s >= level.requests_per_s > 0
