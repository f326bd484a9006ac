"""The benchmarks as commands: what they do before they work for minutes."""

from __future__ import annotations

import importlib
import runpy
import signal
import sys
from multiprocessing import Pool
from pathlib import Path

import pytest

from benchmarks.hybrid import start_worker

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text() and not path.stem.endswith("_worker")
)
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


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_that_is_asked_what_it_does_says_so_and_does_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)

    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("name", ["peers.__main__", "peers.servers"])
def test_a_peer_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.peers.PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", [name])

    with pytest.raises(SystemExit, match=f"vllm is not installed in {tmp_path}/build/vllm"):
        importlib.import_module(f"benchmarks.{name}").main()


@pytest.mark.parametrize("told", ["0", "-1", "x", "1.5"])
def test_what_is_no_number_of_things_is_refused(told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("benchmarks.hybrid").main(["--jobs", told])

    assert capsys.readouterr().err.endswith(f"argument --jobs: {told!r}; allowed: 1 or more\n")


def test_an_interrupt_is_not_for_the_workers_of_a_pool() -> None:
    with Pool(1, start_worker) as pool:
        assert pool.apply(signal.getsignal, (signal.SIGINT,)) is signal.SIG_IGN
