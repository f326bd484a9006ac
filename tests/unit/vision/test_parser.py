"""NVIDIA's own parser and builder take the float16 graph, without a GPU.

`tensorrt-rtx-cu12` is a sibling of TensorRT that builds for a named kind of GPU on any machine; its engines are not
interchangeable. 'make gpu-checks' installs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from python_backend.checkpoint import CheckpointFacts
from python_backend.vision.engine_build import EngineRefused, build

trt = pytest.importorskip("tensorrt_rtx", reason="'make gpu-checks' installs it")


def for_ada(config: Any) -> None:
    """Builds for compute capability 8.9; this library knows no 9.0."""
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)


def test_nvidias_parser_takes_the_graph_and_builds_an_engine(
    half_graph: Path, facts: CheckpointFacts, tmp_path: Path
) -> None:
    phases: list[str] = []
    cache = tmp_path / "encoder.timing"

    data = build(trt, half_graph, facts.image_size, cache, lambda phase, share: phases.append(phase), for_ada)

    assert len(data) > 1_000_000  # the weights of the demo's encoder
    assert phases
    assert cache.stat().st_size > 0


def test_what_is_no_graph_is_refused_in_the_parsers_words(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no graph")

    with pytest.raises(EngineRefused, match=r"does not take broken\.onnx: "):
        build(trt, path, 336, None, adjust=for_ada)
