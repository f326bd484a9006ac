"""A stage that dies is seen, restarted, and said to be back; a real process for the pulse."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from python_backend.errors import PeerGone
from python_backend.pulse import STALE_S, Pulse, is_beating, pulse_path
from python_backend.supervisor import Supervisor


def wait_until(condition: object, timeout_s: float = 10.0) -> bool:
    until = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


class Stages:
    """Replicas that a test kills; `events` has what the supervisor did."""

    def __init__(self, *alive: str, failures: int = 0) -> None:
        self.alive = set(alive)
        self.failures = failures
        self.events: list[str] = []

    def restart(self, name: str) -> None:
        self.events.append(f"restart {name}")
        if self.failures:
            self.failures -= 1
            raise PeerGone("not yet")
        self.alive.add(name)

    def start(self, *names: str) -> Supervisor:
        return Supervisor(
            names,
            is_alive=lambda name: name in self.alive,
            restart=self.restart,
            on_death=lambda name: self.events.append(f"death {name}"),
            on_return=lambda name: self.events.append(f"return {name}"),
            look_s=0.005,
            first_pause_s=0.01,
        )


def test_a_replica_that_dies_is_restarted_and_one_that_lives_is_not() -> None:
    stages = Stages("a", "b")
    supervisor = stages.start("a", "b")
    time.sleep(0.05)
    stages.alive.discard("b")
    assert wait_until(lambda: len(stages.events) == 3)
    supervisor.close()
    assert stages.events == ["death b", "restart b", "return b"]


def test_a_restart_that_fails_is_tried_again() -> None:
    stages = Stages("a", failures=2)
    supervisor = stages.start("a")
    time.sleep(0.05)
    stages.alive.clear()
    assert wait_until(lambda: "return a" in stages.events)
    supervisor.close()
    assert stages.events == ["death a", "restart a", "restart a", "restart a", "return a"]


def test_a_replica_that_is_still_loading_is_not_restarted() -> None:
    stages = Stages()
    supervisor = stages.start("a")
    time.sleep(0.1)
    supervisor.close()
    assert stages.events == []


def test_it_dies_twice_and_is_brought_back_twice() -> None:
    stages = Stages("a")
    supervisor = stages.start("a")
    for _ in range(2):
        time.sleep(0.05)
        stages.alive.clear()
        stages.events.clear()
        assert wait_until(lambda: stages.events == ["death a", "restart a", "return a"])
    supervisor.close()


def test_a_killed_process_has_no_pulse_at_once(tmp_path: Path) -> None:
    path = pulse_path("1-1-1", "stage", tmp_path)
    script = f"""
import sys, time
from pathlib import Path
from python_backend.pulse import Pulse
Pulse(Path({str(path)!r}))
print("beating", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "beating\n"
    assert is_beating(path, time.monotonic())
    process.send_signal(signal.SIGKILL)
    # Not yet waited for: a zombie, as Triton leaves its stubs.
    assert wait_until(lambda: not is_beating(path, time.monotonic()), 2.0)
    process.wait()
    assert not is_beating(path, time.monotonic())


def test_a_process_that_hangs_loses_its_pulse(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    assert is_beating(tmp_path / "pulse", time.monotonic())
    assert not is_beating(tmp_path / "pulse", time.monotonic() + STALE_S + 1)
    pulse.close()
    assert list(tmp_path.iterdir()) == []


def test_no_file_and_a_broken_file_are_no_pulse(tmp_path: Path) -> None:
    assert not is_beating(tmp_path / "none", 0.0)
    (tmp_path / "short").write_bytes(b"x")
    assert not is_beating(tmp_path / "short", 0.0)
