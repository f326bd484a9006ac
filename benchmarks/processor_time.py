"""Who used the CPUs: a server's stages, what is in front of them, and everybody else; from /proc."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STAGES = {"encode": "clip_encoder", "decode": "llava_decoder"}
FRONT = ("client", "server", "relay")
ROLES = (*FRONT, *STAGES)


def processor_time() -> dict[str, float]:
    """CPU seconds so far, by role: of this process (`client`) and all that it started, and `all` of the machine."""
    used = dict.fromkeys(ROLES, 0.0)
    parents = {pid: _parent(pid) for pid in _pids()}
    for pid in parents:
        if _descends(pid, os.getpid(), parents):
            used[_role(pid)] += _seconds(pid)
    first = Path("/proc/stat").read_text().split("\n")[0].split()
    user, _, system, _, _, irq, softirq, steal = (int(each) for each in first[1:9])  # without `nice`, which gives way
    return {**used, "all": (user + system + irq + softirq + steal) / TICKS_PER_S}


def between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was used from the one to the other; `others` is what no role did."""
    used = {name: after[name] - before[name] for name in before}
    return {**used, "others": max(0.0, used["all"] - sum(used[role] for role in ROLES))}


def _role(pid: int) -> str:
    if pid == os.getpid():
        return "client"
    command = _command(pid)
    for role, model in STAGES.items():
        if model in command:
            return role
    return "relay" if "python_backend_stub" in command else "server"


def _pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]


def _fields(pid: int) -> list[str]:
    """Those of /proc/PID/stat behind the name, which may hold blanks; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[1]) if fields else 0


def _seconds(pid: int) -> float:
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = parents.get(pid, 0)
    return False
