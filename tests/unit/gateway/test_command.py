"""`vlm-relay gateway` as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from client.gateway.listening import bind
from tests.process import Process
from tests.unit.gateway.conftest import Upstream

ROOT = Path(__file__).parents[3]
BODY = {"messages": [{"role": "user", "content": "What?"}], "stream": True}


def _started(log: Path, *options: str, keys: str = "") -> Process:
    command = [sys.executable, "-m", "client.gateway", "--port", "0", *options]
    return Process(log, command, {**os.environ, "VLM_RELAY_API_KEYS": keys})


def _url(command: Process) -> str:
    """Where it listens, once it does."""
    url = command.wait_for(r"gateway on (http://[\d.:]+)")[1]
    while True:  # it says where it is going to listen, then listens
        try:
            httpx.get(f"{url}/health/live", trust_env=False)
        except httpx.ConnectError:
            time.sleep(0.02)
        else:
            return url


def _knock(url: str) -> None:
    """Until it is not let in."""
    for _ in range(1000):
        httpx.get(f"{url}/health/live", trust_env=False)
        time.sleep(0.02)


@pytest.fixture
def command(upstream: Upstream, tmp_path: Path) -> Iterator[Process]:
    """Started with two keys; killed at the end if the test did not stop it."""
    started = _started(tmp_path / "gateway.log", "--url", upstream.address, keys="one, two")
    yield started
    started.end()


def test_keys_come_from_the_environment_and_ctrl_c_stops_cleanly(command: Process) -> None:
    url = _url(command)

    statuses = [
        httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False).status_code
        for key in ("one", "two", "three")
    ]
    command.process.send_signal(signal.SIGINT)

    assert statuses == [200, 200, 401]
    assert command.process.wait(20) == 0
    assert command.said().rstrip().endswith("gateway stopped")
    assert "Traceback" not in command.said()
    assert "one" not in re.sub(r"gateway on .*", "", command.said())


def test_a_second_ctrl_c_ends_running_answers_and_says_so(command: Process, upstream: Upstream) -> None:
    upstream.play([upstream.chunk("a "), upstream.silence()])
    url, headers = _url(command), {"Authorization": "Bearer one"}
    begun, lines = threading.Event(), []

    def ask() -> None:
        with (
            httpx.Client(timeout=60, trust_env=False) as http,
            http.stream("POST", f"{url}/v1/chat/completions", json=BODY, headers=headers) as response,
        ):
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(20)
    command.process.send_signal(signal.SIGINT)
    with pytest.raises(httpx.TransportError):  # the signal has been seen: nobody is let in any more
        _knock(url)
    is_waiting = command.process.poll() is None
    command.process.send_signal(signal.SIGINT)

    assert is_waiting
    assert command.process.wait(30) == 0
    assert upstream.cancelled.wait(30)
    asking.join(30)
    assert '"message":"the gateway is stopping"' in lines[-2]
    assert "Traceback" not in command.said()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "http://127.0.0.1:8000"], "must be host:port"),
        (["--max-images", "0"], "max_images must be above 0"),
        (["--metrics-url", "127.0.0.1:8002"], "metrics_url must begin with http"),
        (["--host", "203.0.113.1"], "give another with --port"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path, options: list[str], words: str) -> None:
    command = _started(tmp_path / "gateway.log", *options)

    assert command.process.wait(30) == 2
    assert words in command.said()
    assert command.said().count("\n") == 1


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        command = _started(tmp_path / "gateway.log", "--port", str(taken.getsockname()[1]))

        assert command.process.wait(30) == 2

    assert "Address already in use; give another with --port" in command.said()
