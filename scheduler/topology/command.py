"""The command `vlm-relay topology [FILE]`: how the GPUs are linked, here or in a recorded text."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from scheduler.topology.discover import discover
from scheduler.topology.matrix import parse
from scheduler.topology.report import to_json, to_table
from scheduler.topology.text import decode
from scheduler.topology.topology import Topology, TopologyRefused

EXIT_OK, EXIT_REFUSED, EXIT_NO_FILE = 0, 1, 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of this command."""
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="recorded output of `nvidia-smi topo -m`, or - for standard input; without it, this machine",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON for a program, not a table")
    parser.add_argument(
        "--gpu-name", metavar="NAME", help="what the GPUs of FILE are, for the GB/s: a text does not say it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the topology and return the exit code: 1 for a text without a matrix, 2 for a file that cannot be read."""
    try:
        topology = _read(arguments.file)
    except OSError as error:
        return _fail(f"cannot read {arguments.file}: {error.strerror or error}", EXIT_NO_FILE)
    except TopologyRefused as refused:
        name = "standard input" if arguments.file == "-" else arguments.file
        return _fail(f"{name}: {refused}", EXIT_REFUSED)
    if arguments.gpu_name:
        topology = replace(topology, gpus=tuple(replace(gpu, name=arguments.gpu_name) for gpu in topology.gpus))
    if arguments.json:
        sys.stdout.write(to_json(topology) + "\n")
    elif topology.num_gpus == 0:
        reasons = "".join(f"  {warning}\n" for warning in topology.warnings)
        sys.stdout.write(f"No GPU was found on this machine.\n{reasons}")
    else:
        sys.stdout.write(to_table(topology) + "\n")
    return EXIT_OK


def _read(file: str | None) -> Topology:
    if file is None:
        return discover()
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    return parse(decode(data))


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"vlm-relay topology: {message}\n")
    return code
