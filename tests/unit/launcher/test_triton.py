"""How tritonserver is found and started: command line, environment, backend folder."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from launcher.triton import Keys, Ports, Triton, TritonMissing, build_backend_folder, command, environment, find_triton

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

LIBRARIES = f"{sysconfig.get_config_var('LIBDIR')}:/site/nvidia_pytriton.libs"
WHEEL = Triton(Path("/site/pytriton/tritonserver/bin/tritonserver"), Path("/site/pytriton/tritonserver"))
BIN = os.path.dirname(sys.executable)


def install(folder: Path, *versions: str) -> Path:
    """A wheel's files as `nvidia-pytriton` lays them out, with stubs for some Pythons; its server's folder."""
    package = folder / "pytriton" / "tritonserver"
    backend = "backends/python"
    for name in ("bin/tritonserver", f"{backend}/libtriton_python.so", f"{backend}/triton_python_backend_utils.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    for version in versions:
        stub = package / "python_backend_stubs" / version / "triton_python_backend_stub"
        stub.parent.mkdir(parents=True)
        stub.touch()
    return package


def pretend(monkeypatch: pytest.MonkeyPatch, package: Path | None) -> None:
    """Makes the wheel be found there, or nowhere."""
    spec = None
    if package is not None:
        spec = importlib.machinery.ModuleSpec("pytriton", None, is_package=True)
        spec.submodule_search_locations = [str(package.parent)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)


def test_the_wheels_server_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = install(tmp_path, PYTHON)
    pretend(monkeypatch, package)

    assert find_triton() == Triton(package / "bin" / "tritonserver", package)


def test_a_wheel_without_a_stub_for_this_python_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, install(tmp_path, "3.1", "3.2"))

    with pytest.raises(TritonMissing) as refused:
        find_triton()
    assert str(refused.value) == f"nvidia-pytriton has no stub for Python {PYTHON}; it has 3.1, 3.2"


def test_an_installed_server_is_found_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, None)
    binary = tmp_path / "tritonserver"
    binary.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_triton() == Triton(binary, None)


def test_without_a_server_the_way_to_get_one_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, None)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(TritonMissing) as refused:
        find_triton()
    assert str(refused.value) == "no tritonserver: install the extra 'server' (pip install -e '.[server]')"


def test_the_backend_folder_links_the_stub_beside_the_backend(tmp_path: Path) -> None:
    package = install(tmp_path, PYTHON)

    folder = build_backend_folder(Triton(package / "bin" / "tritonserver", package), tmp_path / "backends")

    assert folder == tmp_path / "backends"
    assert {path.name: path.readlink() for path in (folder / "python").iterdir()} == {
        "libtriton_python.so": package / "backends/python/libtriton_python.so",
        "triton_python_backend_utils.py": package / "backends/python/triton_python_backend_utils.py",
        "triton_python_backend_stub": package / f"python_backend_stubs/{PYTHON}/triton_python_backend_stub",
    }


def test_an_installed_server_keeps_its_backends(tmp_path: Path) -> None:
    assert build_backend_folder(Triton(Path("/bin/tritonserver"), None), tmp_path / "backends") is None
    assert list(tmp_path.iterdir()) == []


def line(triton: Triton, backends: Path | None) -> list[str]:
    """The command line of a server with the models in `/models`."""
    return command(triton, Path("/models"), backends, Ports("127.0.0.1", 1, 2, 3), "region", 15, Keys("key", "shm"))


@pytest.mark.parametrize(
    "flag",
    [
        "--model-repository=/models",
        "--http-address=127.0.0.1",
        "--http-port=1",
        "--grpc-address=127.0.0.1",
        "--grpc-port=2",
        "--metrics-address=127.0.0.1",
        "--metrics-port=3",
        "--http-restricted-api=model-repository,trace,logging:vlm-relay-key=key",  # clients load and unload nothing
        "--grpc-restricted-protocol=model-repository,trace,logging:vlm-relay-key=key",
        "--http-restricted-api=shared-memory:vlm-relay-shm-key=shm",  # and map no memory of the machine
        "--grpc-restricted-protocol=shared-memory:vlm-relay-shm-key=shm",
        "--strict-readiness=true",
        "--exit-timeout-secs=15",
        "--disable-auto-complete-config",
        "--backend-directory=/backends",
        "--backend-config=python,thread-pool-size=256",  # with fewer, waiting calls block each other's answers
        "--backend-config=python,stub-timeout-seconds=600",
        "--backend-config=python,shm-region-prefix-name=region",
    ],
)
def test_the_command_line_has_what_the_server_needs(flag: str) -> None:
    assert line(WHEEL, Path("/backends")).count(flag) == 1


def test_the_command_line_begins_with_the_binary() -> None:
    assert line(WHEEL, Path("/backends"))[0] == str(WHEEL.binary)


def test_an_installed_server_gets_no_backend_directory() -> None:
    flags = line(Triton(Path("t"), None), None)

    assert [flag for flag in flags if flag.startswith("--backend-directory")] == []


@pytest.mark.parametrize(
    ("triton", "base", "expected"),
    [
        (WHEEL, {"PATH": "/bin", "HOME": "/h"}, {"PATH": f"{BIN}:/bin", "HOME": "/h", "LD_LIBRARY_PATH": LIBRARIES}),
        (WHEEL, {}, {"PATH": f"{BIN}:", "LD_LIBRARY_PATH": LIBRARIES}),
        (WHEEL, {"LD_LIBRARY_PATH": "/x"}, {"PATH": f"{BIN}:", "LD_LIBRARY_PATH": f"{LIBRARIES}:/x"}),
        (WHEEL, {"PYTHONHOME": "/elsewhere"}, {"PATH": f"{BIN}:", "LD_LIBRARY_PATH": LIBRARIES}),
        (Triton(Path("t"), None), {"LD_LIBRARY_PATH": "/x"}, {"PATH": f"{BIN}:", "LD_LIBRARY_PATH": "/x"}),
    ],
)
def test_the_server_runs_with_this_environments_packages_and_without_network(
    triton: Triton, base: dict[str, str], expected: dict[str, str]
) -> None:
    before = dict(base)

    assert environment(triton, base) == {**expected, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    assert base == before


@pytest.mark.parametrize("key", ["a b", "a=b", "a,b:c", "schlüssel", "-\n"])
def test_a_shared_memory_key_that_a_command_line_cannot_carry_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match="VLM_RELAY_SHM_KEY must be letters") as refused:
        Keys("control", key)

    assert key not in str(refused.value)
