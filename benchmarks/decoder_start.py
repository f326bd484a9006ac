"""How long the decoder takes to start: the first time, when its operators are compiled, and every time after.

    python -m benchmarks.decoder_start --geometry medium

Each start is a process of its own with an empty cache folder, and then two more with the folder as it was left. Told
apart are the operators (compiled, or found on disk and loaded) and the rest: weights read, rounded to bfloat16 and
laid out. The checkpoint's file is in memory already, as it was just written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.decoder_step import GEOMETRIES, write_checkpoint
from benchmarks.provenance import provenance
from python_backend.checkpoint import PROJECT_ROOT

MEASURED = ("python_backend/decoder", "python_backend/weights.py", "benchmarks/decoder_start.py")
RESULTS = PROJECT_ROOT / "benchmarks" / "results"
STARTS = ("first", "second", "third")


def start(checkpoint: Path) -> dict[str, float]:
    """Seconds for the operators and for all else, in this process."""
    from python_backend.decoder.engine import Engine, EngineOptions
    from python_backend.decoder.native import load_library

    begin_s = time.perf_counter()
    if load_library() is None:
        raise SystemExit("there is no C++ compiler here")
    loaded_s = time.perf_counter()
    engine = Engine.load(checkpoint, EngineOptions(dtype="bfloat16", num_threads=2), time.monotonic)
    engine.close()
    return {"operators_s": loaded_s - begin_s, "engine_s": time.perf_counter() - loaded_s}


def main() -> None:
    """Run the starts and write one JSON file; with --child, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="medium")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(start(arguments.child)))
        return
    report: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(GEOMETRIES[arguments.geometry], Path(folder) / "checkpoint")
        command = [sys.executable, "-m", "benchmarks.decoder_start", "--child", str(Path(folder) / "checkpoint")]
        for name in STARTS:
            told = subprocess.run(
                command, check=True, capture_output=True, text=True, env=os.environ | {"HOME": folder}, cwd=PROJECT_ROOT
            )
            report[name] = json.loads(told.stdout.splitlines()[-1])
            print(name, report[name], flush=True)
    report["provenance"] = provenance("benchmarks.decoder_start", sys.argv[1:], MEASURED)
    path = RESULTS / f"decoder_start_{arguments.geometry}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
