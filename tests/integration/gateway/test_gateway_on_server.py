"""What the gateway promises of the real server: it frees what is left, loses nothing, and sees its state."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from launcher.server import Server
from tests.integration.gateway.test_openai import MESSAGES
from tests.integration.observe import PICTURE, assert_idle, metric, wait_until
from tests.process import Process
from tests.unit.gateway.conftest import Gateway

pytestmark = pytest.mark.server

LONG = {"messages": MESSAGES, "max_tokens": 1200, "ignore_eos": True, "stream": True}


def _generated(server: Server) -> float:
    return metric(server, "vlm_relay_generated_tokens_total")


def _is_free(server: Server) -> bool:
    return wait_until(lambda: metric(server, "vlm_relay_running_sequences") == 0, 10)


def test_leaving_in_the_middle_of_a_stream_frees_the_slot(gateway: Gateway, server: Server) -> None:
    before = _generated(server)

    with gateway.http.stream("POST", "/v1/chat/completions", json=LONG) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)

    assert _is_free(server)
    assert gateway.is_idle()
    assert _generated(server) - before < 1000


def test_leaving_before_the_first_token_frees_the_slot(gateway: Gateway, server: Server) -> None:
    before = _generated(server)
    body = json.dumps(LONG).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )

    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        assert wait_until(lambda: gateway.metric("vlm_relay_gateway_in_flight_requests") == 1, 5)

    assert gateway.is_idle()
    assert _is_free(server)
    assert _generated(server) - before < 1000


def test_health_sees_the_whole_journey_work(gateway: Gateway) -> None:
    response = gateway.http.get("/health")

    assert (response.status_code, response.json()["status"]) == (200, "ok")


def test_the_panel_is_told_the_decision_and_the_gauges(gateway: Gateway) -> None:
    gateway.http.post("/v1/chat/completions", json={**LONG, "max_tokens": 4})

    seen: dict[str, dict[str, object]] = {}
    with gateway.http.stream("GET", "/scheduler/events") as response:
        lines = response.iter_lines()
        for line in lines:
            if line.startswith("event: "):
                seen[line.removeprefix("event: ")] = json.loads(next(lines).removeprefix("data: "))
            if len(seen) == 2 and seen["gauges"]:
                break

    assert seen["request"]["state"] == "answered"
    decision = seen["request"]["decision"]
    assert isinstance(decision, dict)
    assert (decision["encoder"], decision["decoder"]) == ("clip_encoder", "llava_decoder")
    assert seen["gauges"]["llava_decoder"]["vlm_relay_running_sequences"] == 0  # type: ignore[index]


@pytest.fixture
def process(server: Server, tmp_path: Path) -> Iterator[Process]:
    """A gateway in a process of its own, whose memory can be seen."""
    command = [sys.executable, "-m", "client.gateway", "--port", "0", "--url", f"127.0.0.1:{server.ports.grpc}"]
    started = Process(tmp_path / "gateway.log", command)
    yield started
    started.end()
    assert_idle(server)


def _peak_mib(process: Process) -> float:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def test_of_two_hundred_streams_at_a_time_none_is_lost_and_memory_is_bounded(process: Process) -> None:
    num_streams, num_tokens = 200, 4
    url = process.wait_for(r"gateway on (http://[\d.:]+)")[1]
    image = PICTURE.read_bytes() + bytes(100 << 10)  # decoded as the picture that it is
    uri = "data:image/jpeg;base64," + base64.b64encode(image).decode()

    async def ask(client: httpx.AsyncClient, number: int) -> list[str]:
        parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": f"What is {number}?"}]
        messages = [{"role": "user", "content": parts}]
        body = {"messages": messages, "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            return [line async for line in response.aiter_lines() if line]

    async def ask_all(num: int) -> list[list[str]]:
        limits = httpx.Limits(max_connections=num)
        async with httpx.AsyncClient(base_url=url, timeout=180, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(num)))

    assert wait_until(lambda: _listens(url))
    asyncio.run(ask_all(1))
    before_mib = _peak_mib(process)
    answers = asyncio.run(ask_all(num_streams))

    assert [lines[-1] for lines in answers] == ["data: [DONE]"] * num_streams
    ends = [json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] for lines in answers]
    assert ends == ["length"] * num_streams
    bodies_mib = num_streams * len(uri) / 2**20
    assert _peak_mib(process) - before_mib < 6 * bodies_mib + 64


def _listens(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live", trust_env=False).status_code == 200
    except httpx.ConnectError:
        return False
