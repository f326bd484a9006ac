"""A command as a user runs it: started, listened to, ended."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

START_S = 180  # a busy machine


class Process:
    """A running command with what it has said so far."""

    def __init__(self, log: Path, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def said(self) -> str:
        """All of its output."""
        return self._log.read_text()

    def wait_for(self, words: str) -> re.Match[str]:
        """Where it said what matches `words`; it must, before it ends."""
        until = time.monotonic() + START_S
        while (found := re.search(words, self.said())) is None:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.02)
        return found

    def child(self, name: str) -> int:
        """The process of this name that it started."""
        lists = Path(f"/proc/{self.process.pid}/task").glob("*/children")  # one for each of its threads
        children = [child for each in lists for child in each.read_text().split()]
        return next(int(child) for child in children if Path(f"/proc/{child}/comm").read_text() == f"{name}\n")

    def end(self) -> None:
        """SIGTERM if it still runs; killed when it does not mind that."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
