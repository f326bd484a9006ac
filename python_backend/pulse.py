"""Whether a stage's process lives: it beats in shared memory, the scheduler looks.

Triton 2.51 calls a model ready whose process was killed, and lets the streams it served hang for ever. So each
stage writes its process id once and the time a few times a second into a small file; a killed process is seen
at the next look. One whose threads stand still, all waiting for one that holds Python's lock for ever (seen in the
stub when a stage dies under it), ends itself; one that is stopped from outside is taken for dead after `STALE_S`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path

from python_backend.rounds import Rounds
from python_backend.transport.boot import PREFIX, SHARED_MEMORY, process_start

BEAT_S = 0.25
STALE_S = 20.0  # a busy machine was seen to hold a process for more than 5 s; a killed one is seen at once all the same
STANDS_STILL_S = 10.0  # a process that cannot beat for so long writes where its threads stand, and ends itself
_BODY = struct.Struct("<QQQ")  # process id, its start time in clock ticks, last beat in ns on the monotonic clock


def pulse_path(boot_id: str, model: str, directory: Path = SHARED_MEMORY) -> Path:
    """Where the process of a model beats."""
    return directory / f"{PREFIX}pulse.{boot_id}.{model}"


class Pulse:
    """The beating side. One per process; a restarted process takes the place of the dead one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, _BODY.size)
            self._memory = mmap.mmap(file, _BODY.size)
        finally:
            os.close(file)
        self._start = process_start(os.getpid()) or 0
        self._beat()
        draft.rename(path)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops beating and removes the file, unless a process that took this one's place beats there by now."""
        self._is_closed.set()
        self._thread.join(timeout=5)
        if _process_at(self._path) == (os.getpid(), self._start):
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    def _beat(self) -> None:
        _BODY.pack_into(self._memory, 0, os.getpid(), self._start, time.monotonic_ns())

    def _work(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            self._beat()
            faulthandler.dump_traceback_later(STANDS_STILL_S, exit=True)  # put off with every beat
        faulthandler.cancel_dump_traceback_later()


def end_with(server_pid: int) -> None:
    """From now on, ends this process once `server_pid` is not its parent (any more): a stub would live for ever."""

    def look() -> None:
        if os.getppid() != server_pid:
            os._exit(1)

    Rounds("orphan", BEAT_S, look)


def is_beating(path: Path, now_s: float) -> bool:
    """Whether the process that beats at `path` lives and has beaten lately. No file: it has not begun, or closed."""
    body = _read(path)
    if body is None:
        return False
    pid, start, beat_ns = body
    return bool(process_start(pid) == start and now_s - beat_ns / 1e9 < STALE_S)


def end_process(path: Path) -> None:
    """Kills the process that beats at `path`, if it still lives: one that hangs would not let go by itself."""
    process = _process_at(path)
    if process is not None and process_start(process[0]) == process[1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process[0], signal.SIGKILL)


def _process_at(path: Path) -> tuple[int, int] | None:
    """Id and start time of the process that beats, or beat, at `path`."""
    body = _read(path)
    return None if body is None else body[:2]


def _read(path: Path) -> tuple[int, int, int] | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _BODY.size:
        return None
    pid, start, beat_ns = _BODY.unpack(data)
    return pid, start, beat_ns
