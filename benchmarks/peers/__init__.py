"""The decoder and the server beside other engines, each in its own process and virtual environment."""

import sys
from pathlib import Path

from python_backend.checkpoint import PROJECT_ROOT

RESULTS = PROJECT_ROOT / "benchmarks" / "results"


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment; ends the benchmark when there is none."""
    path = PROJECT_ROOT / "build" / peer / "bin" / "python"
    if not path.exists():
        sys.exit(f"{peer} is not installed in {path.parents[1]}; benchmarks/README.md says how")
    return path
