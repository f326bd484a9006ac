"""The operators of `decoder.cpp`, compiled for the processor at hand when they are first needed."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from python_backend.decoder.linear import SUFFIXES, call_native
from python_backend.decoder.operators import rotary_tables
from python_backend.weights import DecoderConfig

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "decoder.cpp"
CACHE = Path("~/.cache/vlm-relay")
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-pthread"),
    *("-shared", "-fPIC"),
)
LANES = 16  # channels of a head come in groups of this many
COMPILE_LIMIT_S = 120

_INTEGER, _REAL, _ADDRESS = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES: dict[str, list[type[ctypes._SimpleCData[Any]]]] = {
    "attend_decodes": [*[_ADDRESS] * 5, *[_INTEGER] * 6, _REAL, _ADDRESS],
    "add_and_norm": [*[_ADDRESS] * 4, *[_INTEGER] * 2, _REAL],
    "gate": [*[_ADDRESS] * 2, *[_INTEGER] * 2],
    "rotate_and_store": [*[_ADDRESS] * 5, *[_INTEGER] * 5, *[_ADDRESS] * 3],
    "attend_prompt": [*[_ADDRESS] * 4, *[_INTEGER] * 6, _REAL, _ADDRESS],
    "decode": [_ADDRESS] * 6,
    "product": [*[_ADDRESS] * 3, *[_INTEGER] * 3, _ADDRESS],
    "product_int8": [*[_ADDRESS] * 5, *[_INTEGER] * 3, _ADDRESS],
}


class NativeOperators:
    """The operators for contiguous float32 or bfloat16 tensors on the CPU; `Operators` has the shapes."""

    def __init__(self, library: ctypes.CDLL, config: DecoderConfig, num_positions: int, dtype: torch.dtype) -> None:
        self._config = config
        self._head_sizes = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_width)
        self.scale = config.head_width**-0.5  # of attention's scores
        self.cosine, self.sine = (table.contiguous() for table in rotary_tables(config, num_positions))
        names = ("attend_decodes", "attend_prompt", "add_and_norm", "gate", "rotate_and_store")
        functions = (getattr(library, f"{name}_{SUFFIXES[dtype]}") for name in names)
        self._attend_decodes, self._attend_prompt, self._add_and_norm, self._gate, self._rotate_and_store = functions

    def add_and_norm(self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """See `Operators`."""
        out = torch.empty_like(hidden)
        call_native(self._add_and_norm, hidden, added, weight, out, *hidden.shape, self._config.norm_epsilon)
        return out

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """See `Operators`."""
        config = self._config
        query = heads.new_empty(len(heads), config.num_heads, config.head_width)
        sizes = (len(heads), config.num_heads, config.num_kv_heads, config.head_width, keys.shape[2])
        tables = (self.cosine, self.sine)
        call_native(self._rotate_and_store, heads, *tables, positions, blocks, *sizes, query, keys, values)
        return query

    def attend_decodes(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """See `Operators`; reads the blocks where they are."""
        out = torch.empty_like(query)
        sizes = (len(query), *self._head_sizes, keys.shape[2], tables.shape[1])
        call_native(self._attend_decodes, query, keys, values, tables, lengths, *sizes, self.scale, out)
        return out

    def attend_prompt(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, num_before: int
    ) -> torch.Tensor:
        """See `Operators`; reads the blocks where they are."""
        out = torch.empty_like(query)
        sizes = (len(query), num_before, *self._head_sizes, keys.shape[2])
        call_native(self._attend_prompt, query, keys, values, table, *sizes, self.scale, out)
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators`."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, width)
        call_native(self._gate, gate_up, out, num_rows, width)
        return out


def can_run(config: DecoderConfig, dtype: torch.dtype) -> bool:
    """Whether `NativeOperators` computes models of this shape and dtype."""
    return dtype in SUFFIXES and config.head_width % LANES == 0


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled operators; None where they cannot be built, with the reason in the log.

    Compiling takes a few seconds, once for each version of the source and each kind of processor.
    """
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        logger.warning("no C++ compiler (%s): the decoder runs on torch's operators", ", ".join(COMPILERS))
        return None
    try:
        path = CACHE.expanduser() / f"operators-{_fingerprint(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return _declare(ctypes.CDLL(str(path)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home folder
        reason = getattr(error, "stderr", None) or error
        logger.warning("operators not compiled, the decoder runs on torch's: %s", reason)
        return None


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.pack.argtypes, library.pack.restype = [_ADDRESS, _INTEGER, _INTEGER, _ADDRESS], None
    for name, arguments in _SIGNATURES.items():
        for suffix in SUFFIXES.values():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
    return library


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        os.replace(built, path)  # whole or not at all, whoever else compiles it
    logger.info("operators compiled to %s", path)


def _fingerprint(compiler: str) -> str:
    """Of all that the compiled code depends on: source, flags, compiler, and the processor's abilities."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (SOURCE, *sorted(FOLDER.glob("*.h")))))
    digest.update(repr((compiler, FLAGS, platform.machine(), _processor())).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
