"""The tritonserver process: started, its log passed on, killed with its stubs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


class ServerFailed(RuntimeError):
    """The server could not start, or stopped by itself; the message has its last words."""


class TritonProcess:
    """One run of tritonserver, in a process group of its own."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: Path, log: IO[str]) -> None:
        self._log = log
        self._tail: deque[str] = deque(maxlen=200)
        self._process = subprocess.Popen(
            command,
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us: we drain first
            preexec_fn=_die_with_parent,
        )
        self._reader = threading.Thread(target=self._pass_on, name="log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._process.poll()

    def terminate(self, timeout_s: float) -> bool:
        """Asks it to end; whether it did in time."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Ends it at once, with its stubs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=5)

    def last_words(self) -> str:
        """What its log says last, errors before all else."""
        self._reader.join(timeout=1)
        errors = [line for line in self._tail if re.search(r"[Ee]rror|failed|refused", line)]
        return "".join(f"\n  {line.rstrip()[:500]}" for line in (errors or list(self._tail))[-6:])

    def _pass_on(self) -> None:
        """Copies its output to the log, line by line."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if _is_noise(line):
                continue
            self._tail.append(line)
            with contextlib.suppress(OSError, ValueError):  # a log that was closed stops nobody
                self._log.write(line)
                self._log.flush()


# What tritonserver says on every machine without a GPU, and the table of its options.
_NOISE = (
    "Unable to allocate pinned system memory",
    "CUDA memory pool disabled",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
)


def _is_noise(line: str) -> bool:
    return any(words in line for words in _NOISE) or not line.strip() or line.startswith(("+--", "| "))


def _die_with_parent() -> None:
    """In the child: get SIGTERM when the launcher dies, however it dies; or only the thread that started this child."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
