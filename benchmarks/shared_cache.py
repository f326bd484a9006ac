"""What the shared cache costs the encoder's thread: Redis there, dead, hanging; beside one encode.

    python -m benchmarks.shared_cache --out benchmarks/results/shared_cache.json

Starts a redis-server of its own on a free port of 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from benchmarks.provenance import provenance
from python_backend.transport.shared_cache import SharedCache
from scheduler.output_file import output_file

ROWS, WIDTH = 576, 4096  # one image of LLaVA-1.5-7B
NUM_CALLS = 200


def main() -> None:
    """Measures and prints; writes JSON with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_file)
    arguments = parser.parse_args()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        line = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        server = subprocess.Popen(line, stdout=subprocess.DEVNULL)
        try:
            figures = measure(f"redis://127.0.0.1:{port}/0", server)
        finally:
            server.kill()
            server.wait()
    for name, milliseconds in figures.items():
        print(f"{name:44} {milliseconds:8.3f} ms")
    if arguments.out:
        told = provenance("benchmarks.shared_cache", sys.argv[1:], ("python_backend/transport",))
        arguments.out.write_text(json.dumps({**told, "milliseconds": figures}, indent=2) + "\n")


def measure(url: str, server: subprocess.Popen[bytes]) -> dict[str, float]:
    """Milliseconds by what was done."""
    cache = SharedCache(url, b"m" * 16, 0.05)
    wait(lambda: cache.is_up)
    rows = np.random.default_rng(0).random((ROWS, WIDTH), np.float32).astype(np.float16)
    key = cache.key(b"pixels")
    cache.put(key, rows)
    wait(lambda: cache.get([key])[0] is not None)
    figures: dict[str, float] = {
        "key of 336 x 336 pixels": median_ms(lambda: cache.key(bytes(336 * 336 * 3))),
        "a hit, 4.7 MB": median_ms(lambda: cache.get([key])),
        "a miss": median_ms(lambda: cache.get([b"no such key"])),
    }
    if not cache.is_up:
        raise TimeoutError("a hit took longer than 50 ms: the machine is busy, try again")
    os.kill(server.pid, signal.SIGSTOP)
    figures["Redis hangs: the first call"] = once_ms(lambda: cache.get([key]))
    figures["Redis hangs: each later call"] = median_ms(lambda: cache.get([key]))
    os.kill(server.pid, signal.SIGCONT)
    wait(lambda: cache.is_up)
    server.kill()
    server.wait()
    figures["Redis died: the first call"] = once_ms(lambda: cache.get([key]))
    figures["Redis died: each later call"] = median_ms(lambda: cache.get([key]))
    cache.close()
    return figures


def once_ms(act: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3


def median_ms(act: Callable[[], object]) -> float:
    """The median of many calls."""
    return statistics.median(once_ms(act) for _ in range(NUM_CALLS))


def wait(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; gives up after ten seconds."""
    until = time.monotonic() + 10
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("Redis did not do what was expected of it")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
