"""A directory of its own in the real /dev/shm for each test, and the processes and stores that live in it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from python_backend.transport.boot import BootKey, boot_key
from python_backend.transport.handle import fingerprint_of
from python_backend.transport.janitor import remove_orphans
from python_backend.transport.layout import Memory, SegmentLayout
from python_backend.transport.segment import Segment
from python_backend.transport.store import EmbeddingStore

ROOT = Path(__file__).resolve().parents[3]


class Peer:
    """Another process, `peer.py` or another script: takes a command a line, answers with a line."""

    def __init__(
        self, directory: Path, parent_pid: int, script: str = "peer.py", variables: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), str(directory), str(parent_pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})},
            text=True,
        )

    def ask(self, *words: str) -> str:
        """The answer to a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it as a crash would: nothing of it runs any more."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """An empty directory in /dev/shm; at the end nothing may be left in it but the key of the boot."""
    with tempfile.TemporaryDirectory(prefix="vlm_relay_test.", dir="/dev/shm") as name:
        directory = Path(name)
        yield directory
        left = [entry.name for entry in directory.iterdir() if not entry.name.startswith("vlm_relay.boot.")]
        assert left == []


@pytest.fixture
def boot(shared_memory: Path) -> BootKey:
    """The key of the boot whose parent is the parent of this process."""
    return boot_key(os.getppid(), shared_memory)


@pytest.fixture
def fingerprint() -> bytes:
    return fingerprint_of("a model", "its preprocessing")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def new_peer(shared_memory: Path) -> Iterator[Callable[[], Peer]]:
    """Starts processes of the same boot; all have ended at the end."""
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer(shared_memory, os.getppid()))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


@pytest.fixture
def segment(shared_memory: Path, boot: BootKey) -> Iterator[Segment]:
    """A segment of three slots of 64 bytes and six leases."""
    made = Segment.create(boot.id, SegmentLayout(num_slots=3, slot_bytes=64, num_leases=6), shared_memory)
    yield made
    made.close()


@pytest.fixture
def store(segment: Segment, fingerprint: bytes, clock: Clock) -> Iterator[EmbeddingStore]:
    """A store in `segment`; at the end every lease has come back or run out, and every slot can be had."""
    made = EmbeddingStore(segment, fingerprint, clock, lease_s=120.0)
    yield made
    made.sweep(clock() + 120.0)
    assert made.counts.num_leases_out == 0
    assert made.has_room(segment.layout.num_slots)
    made.close()


@pytest.fixture
def start_owner(shared_memory: Path, standin_library: Path) -> Iterator[Callable[..., Peer]]:
    """Starts owners of embeddings; what a killed one left of the stand-in's memory goes at the end."""
    peers: list[Peer] = []

    def start(index: int = 0, memory: Memory = "device", **variables: str) -> Peer:
        variables = {"LD_LIBRARY_PATH": str(standin_library.parent), **variables}
        peers.append(Peer(shared_memory, os.getppid(), "device_peer.py", variables))
        assert peers[-1].ask("create", str(index), memory).startswith("vlm_relay.")
        return peers[-1]

    yield start
    for peer in peers:
        end(peer)
    remove_orphans(shared_memory)


def end(peer: Peer) -> None:
    """Kills it, and removes what it left of the stand-in's memory."""
    peer.kill()
    for path in Path("/dev/shm").glob(f"standin_cuda.{peer.pid}.*"):
        path.unlink()
