"""Whether a decoder's process can open an encoder's GPU memory, found out by doing it, and how fast a copy is.

    this process   allocate, fill, export ── handle on the command line ──▶ child: open, copy, compare, time

What the driver says about peer access is not enough: containers without a common IPC namespace, WSL and passed-through
GPUs refuse only when a handle is opened.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from python_backend.transport.cuda import CudaDevice, CudaError, Driver, Event, Stream
from scheduler.plan import Transfer

NUM_BYTES = 64 << 20  # far above what latency would hide, far below what a loaded GPU could miss
NUM_COPIES = 5
TIMEOUT_S = 120.0  # a child's start and its context take seconds on a busy machine


def probe(
    driver: Driver, encoder: int, decoder: int, variables: Mapping[str, str] | None = None, num_bytes: int = NUM_BYTES
) -> Transfer:
    """How embeddings come from GPU `encoder` to a process on GPU `decoder`.

    `variables` are the child's environment, as for `subprocess`. Raises `CudaError` if even staging fails.
    """
    names = f"cuda:{encoder}", f"cuda:{decoder}"
    source = driver.device(encoder)
    pattern = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    memory = source.allocate(num_bytes)
    try:
        stream = source.new_stream()
        stream.copy_in(memory.address, pattern.ctypes.data, num_bytes)
        stream.synchronize()
        stream.close()
        try:
            seconds = _ask_child(memory.export(), decoder, pattern, variables)
        except (CudaError, ProbeFailed) as error:
            rate = _staged_rate(source, memory.address, driver.device(decoder), pattern)
            return Transfer(encoder=names[0], decoder=names[1], route="staged", gigabytes_per_s=rate, why=str(error))
    finally:
        memory.close()
    return Transfer(
        encoder=names[0],
        decoder=names[1],
        route="device" if encoder == decoder else "peer",
        gigabytes_per_s=_rate(num_bytes, seconds),
    )


class ProbeFailed(RuntimeError):
    """The child could not open the memory, or read something else than was there."""


def open_and_copy(driver: Driver, decoder: int, handle: bytes, num_bytes: int, digest: str) -> dict[str, object]:
    """The child's part: `{"seconds": ...}` of the fastest copy, or `{"error": ...}`."""
    device = driver.device(decoder)
    try:
        peer = device.open(handle, num_bytes)
        target = device.allocate(num_bytes)
        stream = device.new_stream()
        seconds = min(_timed(device, stream, lambda: stream.copy(target.address, peer.address, num_bytes)))
        values = np.zeros(num_bytes, np.uint8)
        stream.copy_out(values.ctypes.data, target.address, num_bytes)
        stream.synchronize()
        for each in (peer, target, stream):
            each.close()
    except CudaError as error:
        return {"error": str(error)}
    if _digest(values) != digest:
        return {"error": "other bytes came than were sent"}
    return {"seconds": seconds}


def _ask_child(
    handle: bytes, decoder: int, pattern: npt.NDArray[np.uint8], variables: Mapping[str, str] | None
) -> float:
    command = [interpreter(), "-m", "python_backend.transport", "open", str(decoder), handle.hex()]
    command += [str(pattern.nbytes), _digest(pattern)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed(f"the copy did not end in {TIMEOUT_S:g} s") from error
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ProbeFailed(f"the process on cuda:{decoder} ended with {done.returncode}: {last}") from error
    if "error" in answer:
        raise ProbeFailed(str(answer["error"]))
    return float(answer["seconds"])


def _staged_rate(source: CudaDevice, address: int, target: CudaDevice, host: npt.NDArray[np.uint8]) -> float:
    """GB/s from one GPU into pinned host memory and out of it to the other, one after the other."""
    undo = source.pin(host.ctypes.data, host.nbytes, is_read_only=False)
    landing = target.allocate(host.nbytes)
    try:
        out, into = source.new_stream(), target.new_stream()
        seconds = min(_timed(source, out, lambda: out.copy_out(host.ctypes.data, address, host.nbytes)))
        seconds += min(_timed(target, into, lambda: into.copy_in(landing.address, host.ctypes.data, host.nbytes)))
        out.close()
        into.close()
    finally:
        landing.close()
        undo()
    return _rate(host.nbytes, seconds)


def _timed(device: CudaDevice, stream: Stream, copy: Callable[[], None]) -> list[float]:
    events: list[tuple[Event, Event]] = [(device.new_event(), device.new_event()) for _ in range(NUM_COPIES)]
    for start, end in events:
        stream.record(start)
        copy()
        stream.record(end)
    stream.synchronize()
    seconds = [end.seconds_since(start) for start, end in events]
    for pair in events:
        for event in pair:
            event.close()
    return seconds


def _rate(num_bytes: int, seconds: float) -> float:
    return num_bytes / max(seconds, 1e-9) / 1e9


def _digest(values: npt.NDArray[np.uint8]) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def interpreter() -> str:
    """A Python to start: inside Triton's stub `sys.executable` is not one."""
    name = Path(sys.executable or "").name
    return sys.executable if name.startswith("python") else shutil.which("python3") or "python3"
