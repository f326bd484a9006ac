"""What programs that never rest cost a decode step on both cores: by the decoder's own threads, and by OpenMP's.

    python -m benchmarks.busy_neighbours

One sequence decodes with two threads, alone and beside one busy process per core, first with the compiled operators,
whose threads take pieces of work, then with torch's, whose threads wait for each other at the end of every loop. The
fair share of a machine that is asked for twice is twice the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.decoder_step import GEOMETRIES, EngineSide, write_checkpoint
from benchmarks.provenance import provenance
from python_backend.decoder.engine import EngineOptions

MEASURED = ("python_backend/decoder", "benchmarks/busy_neighbours.py", "benchmarks/decoder_step.py")
RESULT = Path(__file__).with_name("results") / "busy_neighbours.json"
NUM_THREADS, NUM_TOKENS = 2, 24
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
    """Measure both kinds, and write one JSON file."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(GEOMETRIES["small"], Path(folder))
        for name in ("compiled", "torch"):
            options = EngineOptions(dtype="bfloat16", num_threads=NUM_THREADS, compile=name == "compiled")
            side = EngineSide(Path(folder), options, NUM_TOKENS)
            side.round(1)
            alone_s = side.round(1).step_wall_s
            with neighbours():
                beside_s = side.round(1).step_wall_s
            side.close()
            rows[name] = {"alone_ms": 1e3 * alone_s, "beside_ms": 1e3 * beside_s, "ratio": beside_s / alone_s}
            print(name, rows[name], flush=True)
    report = {"provenance": provenance("benchmarks.busy_neighbours", sys.argv[1:], MEASURED), **rows}
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
