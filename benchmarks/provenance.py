"""What must stand beside a figure: machine, versions, commit, command, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from python_backend.checkpoint import PROJECT_ROOT

DISTRIBUTIONS = ("numpy", "nvidia-pytriton", "tritonclient", "torch", "onnxruntime")


def provenance(
    module: str, arguments: Sequence[str], measured: Sequence[str] = ("python_backend",)
) -> dict[str, object]:
    """For JSON; says also how busy the machine was (load average over a minute).

    `measured` are the paths whose code is measured, from the project's root.
    """
    return {
        "command": shlex.join(["python", "-m", module, *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(measured),
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
            "system": platform.system(),
            "load_average": round(os.getloadavg()[0], 1),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def commit(measured: Sequence[str]) -> str:
    """The commit of the work tree, with `+` when `measured` paths have changes since; `unknown` without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        is_changed = bool(_git("status", "--porcelain", "--", *measured))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if is_changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=PROJECT_ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
