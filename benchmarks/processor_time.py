"""Who used the CPUs: a server's stages, what is in front of them, and everybody else; from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STAGES = ("clip_encoder", "llava_decoder")


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """CPU seconds since the machine, or each process, was started."""

    stages_s: float
    front_s: float  # tritonserver, the relay's process, the client in this one
    all_s: float  # of the whole machine, whoever used it

    def since(self, before: ProcessorTime) -> ProcessorTime:
        """What was used in between."""
        return ProcessorTime(self.stages_s - before.stages_s, self.front_s - before.front_s, self.all_s - before.all_s)

    @property
    def others_s(self) -> float:
        """Of neither."""
        return max(0.0, self.all_s - self.stages_s - self.front_s)


def processor_time() -> ProcessorTime:
    """Now, of this process and all that it started."""
    stages_s = front_s = 0.0
    parents = {pid: _parent(pid) for pid in _pids()}
    for pid in parents:
        if _descends(pid, os.getpid(), parents):
            seconds = _seconds(pid)
            if any(stage in _command(pid) for stage in STAGES):
                stages_s += seconds
            else:
                front_s += seconds
    first = Path("/proc/stat").read_text().split("\n")[0].split()
    user, nice, system, _, _, irq, softirq, steal = (int(each) for each in first[1:9])
    return ProcessorTime(stages_s, front_s, (user + nice + system + irq + softirq + steal) / TICKS_PER_S)


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
