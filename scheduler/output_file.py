"""Files that a command will write its result to: asked before the work, not after it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def output_file(told: str) -> Path:
    """The path of a file that can be written; a `type` of argparse.

    Changes nothing: what is there stays as it is, and where nothing was nothing is left.

    Raises:
        argparse.ArgumentTypeError: it cannot be written.
    """
    path = Path(told)
    is_there = os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        reason = error.strerror if path.parent.exists() else "the folder does not exist"
        raise argparse.ArgumentTypeError(f"cannot write {told!r}: {reason}") from None
    if not is_there:
        path.unlink()
    return path


def output_file_or_dash(told: str) -> str:
    """The same, or `-` for standard output."""
    return told if told == "-" else str(output_file(told))
