"""A replica's process keeps to the CPUs that the plan gives it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

CHILD = """
import os, sys, threading, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
from python_backend.models.adapter import bind
ready, stop = threading.Event(), threading.Event()
early = threading.Thread(target=lambda: (ready.set(), stop.wait()))
early.start(); ready.wait()
bind([int(cpu) for cpu in sys.argv[1].split(",") if cpu])
print([sorted(os.sched_getaffinity(int(thread))) for thread in sorted(os.listdir("/proc/self/task"))])
stop.set()
"""


def sets_after(cpus: str) -> str:
    """The CPU sets of all threads of a process that was bound to `cpus`, distinct."""
    command = [sys.executable, "-c", CHILD, cpus]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def distinct(printed: str) -> set[str]:
    """The different CPU sets in what the child printed."""
    return set(printed.strip("[]").split("], ["))


@pytest.mark.parametrize("cpu", sorted(os.sched_getaffinity(0))[:2])
def test_every_thread_is_bound_also_those_started_before(cpu: int) -> None:
    assert distinct(sets_after(str(cpu))) == {str(cpu)}


@pytest.mark.parametrize("cpus", ["", "100000"], ids=["no set", "no such CPU"])
def test_without_a_usable_set_it_stays_where_it_was(cpus: str) -> None:
    everywhere = ", ".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))

    assert distinct(sets_after(cpus)) == {everywhere}
