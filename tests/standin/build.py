"""Builds the stand-in for NVIDIA's driver library; see libcuda.c."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("libcuda.c")
LIBRARY = "libcuda.so.1"


def build(folder: Path) -> Path:
    """The library, built into `folder`; put that on LD_LIBRARY_PATH for other processes."""
    target = folder / LIBRARY
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["gcc", *options, "-o", str(target), str(SOURCE), "-lrt"], check=True)
    return target
