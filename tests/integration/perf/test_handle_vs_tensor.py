"""Passing by handle against passing as a tensor: the benchmark runs on a server of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.handle_vs_tensor import MIN_CHAINS, main

pytestmark = pytest.mark.server


def test_every_embedding_arrives_both_ways(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"

    main(["--chains", str(MIN_CHAINS), "--rounds", "1", "--out", str(out), "--log", str(tmp_path / "log")])

    told = json.loads(out.read_text())
    assert told["checksums"] == "equal"
    assert told["shared_memory"]["handle_bytes"] == 0
