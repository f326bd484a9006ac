"""An engine is used only by what it was built for; anything else is one clear line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from python_backend.vision.engine_file import (
    EngineManifest,
    digest_graph,
    engine_path,
    manifest_path,
    read_engine,
    write_engine,
)

MANIFEST = EngineManifest("10.9.0", "NVIDIA H200", "9.0", "ab" * 32, (1, 4, 8))


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = engine_path(tmp_path / "artifacts", "9.0")
    write_engine(path, b"engine", MANIFEST)
    return path


def test_an_engine_comes_back_where_it_was_built(engine: Path) -> None:
    assert engine.name == "encoder.sm90.engine"
    assert read_engine(engine, MANIFEST) == (b"engine", "")
    assert sorted(path.name for path in engine.parent.iterdir()) == ["encoder.sm90.engine", "encoder.sm90.json"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tensorrt": "10.13.0"}, "was built for tensorrt '10.9.0', this is '10.13.0'"),
        ({"gpu": "NVIDIA H100"}, "was built for gpu 'NVIDIA H200', this is 'NVIDIA H100'"),
        ({"compute_capability": "8.0"}, "was built for compute_capability '9.0', this is '8.0'"),
        ({"graph": "cd" * 32}, "was built for graph"),
        ({"batches": (1, 8, 16)}, "was built for batches [1, 4, 8], this is [1, 8, 16]"),
        ({"layout": 2}, "was built for layout 1, this is 2"),
    ],
)
def test_an_engine_for_something_else_is_not_used(engine: Path, change: dict[str, object], told: str) -> None:
    data, why = read_engine(engine, replace(MANIFEST, **change))  # type: ignore[arg-type]

    assert data is None
    assert why.startswith(f"encoder.sm90.engine {told}")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("no engine", "encoder.sm90.engine is not there"),
        ("no manifest", "encoder.sm90.engine is not there"),
        ("broken manifest", "encoder.sm90.json cannot be read: "),
        ("list as manifest", "encoder.sm90.engine was built for tensorrt None"),
        ("other bytes", "encoder.sm90.engine is damaged or not the one of its manifest"),
    ],
)
def test_half_a_pair_is_not_used(engine: Path, damage: str, told: str) -> None:
    if damage == "no engine":
        engine.unlink()
    elif damage == "no manifest":
        manifest_path(engine).unlink()
    elif damage == "broken manifest":
        manifest_path(engine).write_text("{")
    elif damage == "list as manifest":
        manifest_path(engine).write_text("[]")
    else:
        engine.write_bytes(b"enginf")

    data, why = read_engine(engine, MANIFEST)

    assert data is None
    assert why.startswith(told)


def test_a_write_that_fails_leaves_nothing_that_looks_whole(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_engine(engine, b"newer", MANIFEST)

    assert read_engine(engine, MANIFEST) == (None, "encoder.sm90.engine is not there")
    assert [path.name for path in engine.parent.iterdir()] == ["encoder.sm90.engine"]


def test_the_manifest_names_the_engine_by_its_content(engine: Path) -> None:
    assert set(json.loads(manifest_path(engine).read_text())) == {
        *("tensorrt", "gpu", "compute_capability", "graph", "batches", "layout", "engine")
    }


def test_a_graph_is_known_by_its_data_too(tmp_path: Path) -> None:
    graph, data = tmp_path / "encoder.float16.onnx", tmp_path / ".encoder.float16.onnx.draft.data"
    graph.write_bytes(b"graph")
    data.write_bytes(b"weights")
    before = digest_graph(graph)

    data.write_bytes(b"others")

    assert digest_graph(graph) != before
