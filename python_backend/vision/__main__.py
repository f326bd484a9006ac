"""`python -m python_backend.vision CHECKPOINT ARTIFACTS GPU`: builds the encoder's TensorRT engine for a GPU.

Writes lines of JSON: `{"progress": ...}` while it builds, at last `{"path": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from python_backend.checkpoint import CheckpointRefused, read_facts
from python_backend.transport.cuda import CudaError, CudaMissing, Driver
from python_backend.vision.engine_build import EngineRefused, import_tensorrt
from python_backend.vision.export import ExportFailed
from python_backend.vision.tensorrt import build_engine


def _say(key: str, text: str) -> None:
    print(json.dumps({key: text}), flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m python_backend.vision", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("gpu", type=int)
    parser.add_argument("--force", action="store_true", help="build also when a current one is there")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        device = Driver.load().device(given.gpu)
        path = build_engine(
            import_tensorrt(), read_facts(given.checkpoint), given.artifacts, device, Progress(), given.force
        )
    except CudaMissing as error:
        _say("error", f"an engine is built on the GPU that will run it: {error}")
        return 1
    except (CudaError, EngineRefused, ExportFailed, CheckpointRefused, OSError) as error:
        _say("error", str(error))
        return 1
    _say("path", str(path))
    return 0


class Progress:
    """Says every tenth of a phase once."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def __call__(self, phase: str, share: float) -> None:
        tenth = int(share * 10)
        if tenth > self._said.get(phase, -1):
            self._said[phase] = tenth
            _say("progress", f"{phase} {tenth * 10} %")


if __name__ == "__main__":
    sys.exit(main())
