"""The benchmarks as commands: what they do before they work for minutes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SIMULATED = ("article", "hybrid", "published", "simulator", "splitting", "validation")


@pytest.mark.parametrize("name", SIMULATED)
def test_a_result_that_cannot_be_written_is_refused_before_the_work(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module(f"benchmarks.{name}")

    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--out", "/nowhere/x.json"])

    assert ended.value.code == 2
    assert "argument --out: cannot write '/nowhere/x.json'" in capsys.readouterr().err.splitlines()[-1]


def test_every_benchmark_reads_its_command_line() -> None:
    commands = [path for path in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in path.read_text()]

    assert [path.name for path in commands if "parse_args(" not in path.read_text()] == []
