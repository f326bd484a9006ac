"""A stage that dies is seen, restarted, and said to be back; a real process for the pulse."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.restart import RestartFailed, retry
from python_backend.pulse import STALE_S, Pulse, end_process, is_beating, pulse_path
from python_backend.supervisor import PulseWatch
from python_backend.transport.boot import process_start

BEATS = """
import sys, time
from pathlib import Path
from python_backend.pulse import Pulse
Pulse(Path({path!r}))
print("beating", flush=True)
time.sleep(60)
"""


def wait_until(condition: object, timeout_s: float = 30.0) -> bool:
    until = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


class Stages:
    """Replicas that a test kills and brings back; `events` has what the watch told."""

    def __init__(self, *alive: str) -> None:
        self.alive = set(alive)
        self.events: list[str] = []
        self.num_looks = 0

    def watch(self, *names: str) -> PulseWatch:
        return PulseWatch(
            names,
            is_alive=self._is_alive,
            on_death=lambda name: self.events.append(f"death {name}"),
            on_return=lambda name: self.events.append(f"return {name}"),
            look_s=0.005,
        )

    def _is_alive(self, name: str) -> bool:
        self.num_looks += 1
        return name in self.alive

    def wait_for_looks(self, count: int) -> None:
        """So many more; each replica is looked at in turn."""
        until = self.num_looks + count
        assert wait_until(lambda: self.num_looks >= until)


def test_deaths_and_returns_are_told_once_each_and_of_the_right_one() -> None:
    stages = Stages("a", "b")
    watch = stages.watch("a", "b")
    stages.wait_for_looks(4)
    for _ in range(2):
        stages.events.clear()
        stages.alive.discard("b")
        assert wait_until(lambda: stages.events == ["death b"])
        stages.alive.add("b")
        assert wait_until(lambda: stages.events == ["death b", "return b"])
    stages.wait_for_looks(10)
    watch.close()
    assert stages.events == ["death b", "return b"]


def test_a_replica_that_is_still_loading_has_not_died_and_does_not_return() -> None:
    stages = Stages()
    watch = stages.watch("a")
    stages.wait_for_looks(5)
    stages.alive.add("a")
    stages.wait_for_looks(5)
    watch.close()
    assert stages.events == []


def test_a_restart_that_fails_is_tried_again_after_longer_and_longer_pauses() -> None:
    pauses: list[float] = []
    failures = [RestartFailed("no"), RestartFailed("still no")]

    def act() -> None:
        if failures:
            raise failures.pop()

    retry(act, is_over=lambda: False, pause=lambda pause_s: bool(pauses.append(pause_s)), what="a")
    assert pauses == [1.0, 2.0]


def test_a_restart_is_given_up_when_the_server_stops() -> None:
    pauses: list[float] = []

    def act() -> None:
        raise RestartFailed("no")

    retry(act, is_over=lambda: False, pause=lambda pause_s: pauses.append(pause_s) is None, what="a")
    assert pauses == [1.0]


def test_a_killed_process_has_no_pulse_at_once(tmp_path: Path) -> None:
    path = pulse_path("1-1-1", "stage", tmp_path)
    process = subprocess.Popen([sys.executable, "-c", BEATS.format(path=str(path))], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "beating\n"
    assert is_beating(path, time.monotonic())
    process.send_signal(signal.SIGKILL)
    # Not yet waited for: a zombie, as Triton leaves its stubs.
    assert wait_until(lambda: not is_beating(path, time.monotonic()))
    process.wait()
    assert not is_beating(path, time.monotonic())


@pytest.mark.parametrize("pause_s", [0.0, 1.0])  # the orphan's: it looks before its parent dies, or only afterwards
def test_a_stub_whose_server_dies_dies_too(tmp_path: Path, pause_s: float) -> None:
    stub = f"""
import os, time
from python_backend.pulse import end_with
from python_backend.transport.boot import server_pid
print(os.getpid(), flush=True)
time.sleep({pause_s})
end_with(server_pid())
time.sleep(60)
"""
    server = f"""
import os, subprocess, sys, time
words = ["/x/triton_python_backend_stub", "-c", {stub!r}, "", "", str(os.getpid())]
subprocess.Popen(words, executable=sys.executable)
time.sleep(0.5)
os._exit(0)
"""
    process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    orphan = int(process.stdout.readline())
    process.wait()
    assert process_start(orphan) is not None
    assert wait_until(lambda: process_start(orphan) is None)


def test_a_process_that_hangs_loses_its_pulse(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "pulse")
    assert is_beating(tmp_path / "pulse", time.monotonic())
    assert not is_beating(tmp_path / "pulse", time.monotonic() + STALE_S + 1)
    pulse.close()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_closes_late_leaves_the_pulse_of_its_successor(tmp_path: Path) -> None:
    late = Pulse(tmp_path / "pulse")
    successor = subprocess.Popen(
        [sys.executable, "-c", BEATS.format(path=str(tmp_path / "pulse"))], stdout=subprocess.PIPE, text=True
    )
    assert successor.stdout is not None
    assert successor.stdout.readline() == "beating\n"
    late.close()
    assert is_beating(tmp_path / "pulse", time.monotonic())
    end_process(tmp_path / "pulse")
    assert successor.wait(10) == -signal.SIGKILL
    assert not is_beating(tmp_path / "pulse", time.monotonic())


def test_no_file_and_a_broken_file_are_no_pulse(tmp_path: Path) -> None:
    assert not is_beating(tmp_path / "none", 0.0)
    (tmp_path / "short").write_bytes(b"x")
    assert not is_beating(tmp_path / "short", 0.0)
