"""The GPU's kernels compute what torch's operators do, in Triton's interpreter on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="'make gpu-checks' installs it")

ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = {"float32": 1e-5, "odd width": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def test_every_kernel_agrees_with_torch() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compare_kernels.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert set(errors) == set(TOLERANCE)
    for case, by_name in errors.items():
        assert set(by_name) == {"norm", "add and norm", "sum", "rotated", "keys", "values", "gate", "attended"}
        wrong = {name: error for name, error in by_name.items() if not error <= TOLERANCE[case]}
        assert wrong == {}, case


@pytest.mark.parametrize(("rows", "splits"), [(32, 16), (64, 16), (128, 8), (256, 4), (1024, 1), (4096, 1), (1, 16)])
def test_small_batches_are_split_more(rows: int, splits: int) -> None:
    from python_backend.decoder.gpu_kernels import num_splits

    assert num_splits(rows) == splits
