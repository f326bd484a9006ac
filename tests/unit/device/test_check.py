"""The script for a lent GPU, run dry on a CPU: it must not fail at first contact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.check import SECTIONS, parse
from tests.device.pack import is_wanted
from tests.device.setting import GEOMETRIES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found(standin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What a dry run wrote; the journey is what the integration tests do."""
    out = tmp_path_factory.mktemp("device") / "results" / "device.json"
    command = [sys.executable, "-m", "tests.device.check", "--device", "cpu", "--geometry", "tiny", "--out", str(out)]
    command += ["--driver", str(standin_library), "--sections", "facts", "transport", "encoder", "decoder"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(standin_library.parent)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(out.read_text())["sections"])


def test_every_section_is_whole(found: dict[str, dict[str, object]]) -> None:
    assert list(found) == ["facts", "transport", "encoder", "decoder"]
    assert [name for name, section in found.items() if "error" in section] == []


def test_the_transport_reads_right_bytes_and_refuses_what_it_must(found: dict[str, dict[str, object]]) -> None:
    assert found["transport"]["store"] == {
        "route": "device",
        "are_bytes_right": True,
        "is_stale_refused": True,
        "is_forged_refused": True,
        "is_dead_owner_refused": True,
    }


def test_recorded_and_plain_steps_agree(found: dict[str, dict[str, object]]) -> None:
    batches = found["decoder"]["batches"]
    assert isinstance(batches, dict)
    assert list(batches) == ["1", "3"]
    assert all(row["are_tokens_equal"] for row in batches.values())
    assert all(row["plain_ms"] > 0 and row["graphs_ms"] > 0 and row["ahead_ms"] > 0 for row in batches.values())


def test_a_section_that_fails_leaves_the_others(tmp_path: Path) -> None:
    out = tmp_path / "device.json"
    command = [sys.executable, "-m", "tests.device.check", "--device", "cpu", "--geometry", "tiny", "--out", str(out)]
    command += ["--driver", str(tmp_path / "libcuda.so.1"), "--sections", "transport", "facts"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    sections = json.loads(out.read_text())["sections"]
    assert done.returncode == 1
    assert sections["transport"]["error"].startswith("CudaMissing: no NVIDIA driver")
    assert "error" not in sections["facts"]


def test_the_sizes_are_those_of_the_cost_model() -> None:
    sizes = GEOMETRIES["llava-1.5-7b"]

    assert sizes.image_tokens == 576
    assert sizes.encode_flop == pytest.approx(390e9, rel=0.02)
    assert 2 * sizes.num_parameters == pytest.approx(13.21e9, rel=0.01)


def test_everything_runs_unless_told_otherwise(tmp_path: Path) -> None:
    given = parse(["--out", str(tmp_path / "out.json")])

    assert (given.device, given.geometry, given.sections) == ("cuda", "llava-1.5-7b", list(SECTIONS))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("pytriton/tritonserver/bin/tritonserver", True),
        ("pytriton/tritonserver/python_backend_stubs/3.12/triton_python_backend_stub", True),
        ("pytriton/tritonserver/python_backend_stubs/3.8/triton_python_backend_stub", False),
        ("nvidia_pytriton.libs/libb64.so", True),
        ("pytriton/__init__.py", True),
        ("pytriton/client/client.py", False),
    ],
)
def test_only_what_serves_is_packed(name: str, wanted: bool) -> None:
    assert is_wanted(name, "3.12") == wanted


@pytest.mark.parametrize(("python", "wanted"), [("3.13", True), ("3.12", False)])
def test_another_pythons_library_stays_behind(python: str, wanted: bool) -> None:
    assert is_wanted("nvidia_pytriton.libs/libpython3-419a3a08.13.so.1.0", python) == wanted
