"""`vlm-relay up`: server and gateway together, from start to the last answer."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.observe import wait_until

pytestmark = pytest.mark.server

COMMAND = [sys.executable, "-m", "launcher", "up", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
LISTENS = re.compile(r"gateway on (http://\S+?),? ")
START_S = 180  # a busy machine
LONG = {
    "messages": [{"role": "user", "content": "Who are you?"}],
    "stream": True,
    "max_tokens": 1000,
    "ignore_eos": True,
}


class Up:
    """A running `vlm-relay up` with what it has said so far."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen([*COMMAND, "--port", "0"], stdout=out, stderr=out)

    def said(self) -> str:
        return self._log.read_text()

    def url(self) -> str:
        """Where its gateway listens, once it does."""
        assert wait_until(lambda: bool(LISTENS.search(self.said())) or self.process.poll() is not None, START_S)
        found = LISTENS.search(self.said())
        assert found is not None, self.said()
        return found[1]

    def triton_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "tritonserver\n")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Started; killed at the end if the test did not stop it."""
    started = Up(tmp_path / "up.log")
    yield started
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGTERM)
        try:
            started.process.wait(60)
        except subprocess.TimeoutExpired:
            started.process.kill()
            started.process.wait()


def test_ctrl_c_ends_the_panel_lets_a_running_answer_finish_and_exits_clean(up: Up) -> None:
    url = up.url()
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
