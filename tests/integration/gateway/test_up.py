"""`vlm-relay up`: server and gateway together, from start to the last answer."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.process import Process

pytestmark = pytest.mark.server

COMMAND = [sys.executable, "-m", "launcher", "up", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
LISTENS = r"gateway on (http://\S+?),? "
LONG = {
    "messages": [{"role": "user", "content": "Who are you?"}],
    "stream": True,
    "max_tokens": 1000,
    "ignore_eos": True,
}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Process]:
    """Started; killed at the end if the test did not stop it."""
    started = Process(tmp_path / "up.log", [*COMMAND, "--port", "0"])
    yield started
    started.end()


def test_ctrl_c_ends_the_panel_lets_a_running_answer_finish_and_exits_clean(up: Process) -> None:
    url = up.wait_for(LISTENS)[1]
    panel: list[str] = []

    def watch() -> None:
        with httpx.stream("GET", f"{url}/scheduler/events", timeout=60, trust_env=False) as response:
            panel.extend(response.iter_lines())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()
        next(lines)
        up.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]

    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert up.process.wait(60) == 0
    watcher.join(10)
    assert not watcher.is_alive()
    assert "event: request" in panel
    assert "Traceback" not in up.said()
    assert up.said().rstrip().endswith("stopped")
