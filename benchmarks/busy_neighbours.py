"""What programs that never rest cost a decode step that uses both cores.

    python -m benchmarks.busy_neighbours

One sequence decodes with two threads, alone and beside one busy process per core. The fair share of a machine that is
asked for twice is twice the time; threads that wait for each other at the end of every loop would take far longer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.decoder_step import GEOMETRIES, EngineSide, write_checkpoint
from benchmarks.provenance import provenance
from python_backend.decoder.engine import EngineOptions

MEASURED = ("python_backend/decoder", "benchmarks/busy_neighbours.py", "benchmarks/decoder_step.py")
RESULT = Path(__file__).with_name("results") / "busy_neighbours.json"
NUM_THREADS, NUM_TOKENS, NUM_ROUNDS = 2, 64, 5
BUSY = [sys.executable, "-c", "while True: pass"]


@contextmanager
def neighbours() -> Iterator[None]:
    """One process per core that does nothing, all the time."""
    processes = [subprocess.Popen(BUSY) for _ in range(NUM_THREADS)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure, and write one JSON file."""
    argparse.ArgumentParser(prog="python -m benchmarks.busy_neighbours", description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(GEOMETRIES["medium"], Path(folder))
        side = EngineSide(Path(folder), EngineOptions(dtype="bfloat16", num_threads=NUM_THREADS), NUM_TOKENS)
        side.round(1)
        alone_s = [side.round(1).step_wall_s for _ in range(NUM_ROUNDS)]
        with neighbours():
            beside_s = [side.round(1).step_wall_s for _ in range(NUM_ROUNDS)]
        side.close()
    report = {
        "provenance": provenance("benchmarks.busy_neighbours", sys.argv[1:], MEASURED),
        "alone_ms": 1e3 * median(alone_s),
        "beside_ms": 1e3 * median(beside_s),
        "ratio": median(beside_s) / median(alone_s),
    }
    print(json.dumps(report))
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
