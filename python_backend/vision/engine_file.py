"""An engine on disk with a manifest that says what it was built from and for: pure, without TensorRT.

An engine runs only with the TensorRT release and the kind of GPU that built it. Triton finds out by a failed load
("Version tag does not match"); here the manifest is compared before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

LAYOUT = 1  # raise it when the build changes what it makes


@dataclass(frozen=True, slots=True)
class EngineManifest:
    """What an engine was built from and for."""

    tensorrt: str  # release
    gpu: str  # name
    compute_capability: str  # "9.0"
    graph: str  # SHA-256 of the ONNX graph and its data
    batches: tuple[int, int, int]  # smallest, best, largest
    layout: int = LAYOUT


def engine_path(artifacts: Path, compute_capability: str) -> Path:
    """Where the engine for GPUs of a compute capability lies; kinds of GPU do not share a file."""
    return artifacts / f"encoder.sm{compute_capability.replace('.', '')}.engine"


def manifest_path(engine: Path) -> Path:
    """The manifest beside an engine."""
    return engine.with_suffix(".json")


def digest_graph(graph: Path) -> str:
    """SHA-256 of an ONNX graph with its data files, which begin with its name."""
    hasher = hashlib.sha256(graph.read_bytes())
    for path in sorted(graph.parent.glob(f"*{graph.name}*.data")):
        with path.open("rb") as file:
            hasher.update(hashlib.file_digest(file, "sha256").digest())
    return hasher.hexdigest()


def write_engine(engine: Path, data: bytes, manifest: EngineManifest) -> None:
    """Puts an engine and its manifest in place, each in one step; a half of a pair never looks like a whole."""
    engine.parent.mkdir(parents=True, exist_ok=True)
    manifest_path(engine).unlink(missing_ok=True)
    _replace(engine, data)
    told = {**asdict(manifest), "engine": hashlib.sha256(data).hexdigest()}
    _replace(manifest_path(engine), (json.dumps(told, indent=2) + "\n").encode())


def read_engine(engine: Path, wanted: EngineManifest) -> tuple[bytes | None, str]:
    """The engine if it is what is wanted; else None, and in one line why not."""
    try:
        told = json.loads(manifest_path(engine).read_text())
        data = engine.read_bytes()
    except FileNotFoundError:
        return None, f"{engine.name} is not there"
    except (OSError, ValueError) as error:
        return None, f"{manifest_path(engine).name} cannot be read: {error}"
    expected = {**asdict(wanted), "batches": list(wanted.batches)}
    for field in fields(wanted):
        found = told.get(field.name) if isinstance(told, dict) else None
        if found != expected[field.name]:
            return None, f"{engine.name} was built for {field.name} {found!r}, this is {expected[field.name]!r}"
    if told.get("engine") != hashlib.sha256(data).hexdigest():
        return None, f"{engine.name} is damaged or not the one of its manifest"
    return data, ""


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
