"""The benchmarks as commands: what they do before they work for minutes."""

from __future__ import annotations

import importlib
import signal
from multiprocessing import Pool
from pathlib import Path

import pytest

from benchmarks.hybrid import start_worker

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


def test_an_interrupt_is_not_for_the_workers_of_a_pool() -> None:
    with Pool(1, start_worker) as pool:
        assert pool.apply(signal.getsignal, (signal.SIGINT,)) is signal.SIG_IGN
