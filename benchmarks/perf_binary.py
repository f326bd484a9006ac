"""A perf_analyzer that runs here: the one on the PATH, or the one in a wheel of `tritonclient`, made to run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from python_backend.checkpoint import PROJECT_ROOT

# Later wheels need a newer C library than stable distributions have, or carry no binary at all.
WHEEL = "tritonclient==2.46.0"
MEMBER = "tritonclient-2.46.0.data/data/bin/perf_analyzer"
FOLDER = PROJECT_ROOT / "build" / "perf_analyzer"
# What the binary asks for, and how the copies in the server's wheel are called.
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
DOWNLOAD_TIMEOUT_S = 300


class PerfAnalyzerMissing(RuntimeError):
    """No perf_analyzer that runs; the message says what was tried."""


class NetworkAbsent(PerfAnalyzerMissing):
    """It is not here, and the wheel cannot be fetched because no package index answers."""


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """A binary, and the environment it needs."""

    binary: Path
    environment: dict[str, str]


def find_perf_analyzer(variables: Mapping[str, str], folder: Path = FOLDER) -> PerfAnalyzer:
    """A perf_analyzer that has told its version; fetches it into `folder` when there is none yet.

    Raises:
        NetworkAbsent: it has to be fetched, and that needs a network.
        PerfAnalyzerMissing: what was found or fetched does not run.
    """
    on_path = shutil.which("perf_analyzer", path=variables.get("PATH"))
    if on_path is not None and _failure(PerfAnalyzer(Path(on_path), dict(variables))) is None:
        return PerfAnalyzer(Path(on_path), dict(variables))
    binary = folder / "perf_analyzer"
    if not binary.exists():
        _unpack(_download(folder), binary)
    libraries = _link_libraries(folder / "lib")
    inherited = variables.get("LD_LIBRARY_PATH")
    path = f"{libraries}:{inherited}" if inherited else str(libraries)
    analyzer = PerfAnalyzer(binary, {**variables, "LD_LIBRARY_PATH": path})
    failure = _failure(analyzer)
    if failure is not None:
        raise PerfAnalyzerMissing(f"{binary} does not run: {failure}")
    return analyzer


def _failure(analyzer: PerfAnalyzer) -> str | None:
    """Why it cannot even tell its version; None when it can."""
    try:
        done = subprocess.run(
            [analyzer.binary, "--version"], env=analyzer.environment, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if "Version" in done.stdout + done.stderr else (done.stderr or done.stdout).strip()[-500:]


def _download(folder: Path) -> Path:
    """The wheel, fetched with pip."""
    folder.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--retries", "1"]
    done = subprocess.run(
        [*line, "--dest", folder, WHEEL], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
    )
    wheels = sorted(folder.glob("tritonclient-*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if any(sign in done.stderr for sign in ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError")):
        raise NetworkAbsent(f"perf_analyzer is not on the PATH, and no package index answers to give {WHEEL}")
    raise PerfAnalyzerMissing(f"pip could not download {WHEEL}: {done.stderr.strip()[-500:]}")


def _unpack(wheel: Path, binary: Path) -> None:
    draft = binary.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(wheel) as archive:
        draft.write_bytes(archive.read(MEMBER))
    draft.chmod(0o755)
    draft.rename(binary)
    wheel.unlink()


def _link_libraries(folder: Path) -> Path:
    """A folder with the libraries that few systems have, under the names the binary asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return folder
    source = Path(next(iter(spec.submodule_search_locations))).parent / "nvidia_pytriton.libs"
    for name, pattern in LIBRARIES.items():
        found = sorted(source.glob(pattern))
        if found:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(found[0])
    return folder
