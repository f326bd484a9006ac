"""Where tritonserver is on this machine, and how it must be started so that its Python backend works."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from client.shared_memory import KEY_VARIABLE

CONTROL_HEADER = "vlm-relay-key"
SHARED_MEMORY_HEADER = "vlm-relay-shm-key"  # client/shared_memory.py sends it
THREAD_POOL = 256  # Triton's own 32 block the sends of one model behind its waiting BLS calls
STUB_TIMEOUT_S = 600  # loading a large checkpoint takes minutes


class TritonMissing(RuntimeError):
    """No usable tritonserver; the message says how to get one."""


@dataclass(frozen=True, slots=True)
class Triton:
    """A tritonserver binary. `package` is the folder of the PyPI wheel's server; None for an installed one."""

    binary: Path
    package: Path | None


@dataclass(frozen=True, slots=True)
class Ports:
    """Where one server listens."""

    host: str
    http: int
    grpc: int
    metrics: int

    @property
    def near_host(self) -> str:
        """The address for those on this machine."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host


@dataclass(frozen=True, slots=True)
class Keys:
    """What opens those of Triton's interfaces that are not for everybody."""

    control: str = field(repr=False)  # the launcher's own
    shared_memory: str = field(repr=False)  # of clients on this machine that the operator trusts

    def __post_init__(self) -> None:
        """Refuses what Triton's command line would take for something else.

        Raises:
            ValueError: the message names the variable, and not the key.
        """
        if not re.fullmatch(r"[\w.-]+", self.shared_memory, re.ASCII):
            raise ValueError(f"{KEY_VARIABLE} must be letters, digits, dots, hyphens and underscores")


def find_triton() -> Triton:
    """The server of the `nvidia-pytriton` wheel, or a `tritonserver` on the PATH (as in NVIDIA's images).

    Raises:
        TritonMissing: neither is there, or the wheel has no stub for this Python.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        found = shutil.which("tritonserver")
        if found is None:
            raise TritonMissing("no tritonserver: install the extra 'server' (pip install -e '.[server]')")
        return Triton(Path(found), None)
    package = Path(next(iter(spec.submodule_search_locations))) / "tritonserver"
    if not _stub(package).is_file():
        versions = sorted(path.name for path in (package / "python_backend_stubs").iterdir())
        raise TritonMissing(f"nvidia-pytriton has no stub for Python {_python()}; it has {', '.join(versions)}")
    return Triton(package / "bin" / "tritonserver", package)


def build_backend_folder(triton: Triton, target: Path) -> Path | None:
    """A folder of links that holds the Python backend with this Python's stub beside it.

    The wheel keeps the stubs apart, and writing into site-packages would be worse. None for an installed
    server, whose backends are in their place.
    """
    if triton.package is None:
        return None
    backend = target / "python"
    backend.mkdir(parents=True, exist_ok=True)
    source = triton.package / "backends" / "python"
    for path in (source / "libtriton_python.so", source / "triton_python_backend_utils.py", _stub(triton.package)):
        (backend / path.name).symlink_to(path)
    return target


def environment(triton: Triton, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: this virtual environment's packages, this interpreter's library."""
    variables = dict(base)
    # The stub's embedded interpreter takes the prefix of the first python3 on the PATH.
    variables["PATH"] = f"{Path(sys.executable).parent}:{base.get('PATH', '')}"
    variables["HF_HUB_OFFLINE"] = "1"
    variables["TRANSFORMERS_VERBOSITY"] = "error"
    variables.pop("PYTHONHOME", None)
    if triton.package is not None:
        folders = [str(sysconfig.get_config_var("LIBDIR")), str(_libraries(triton.package))]
        inherited = base.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = ":".join(folders + ([inherited] if inherited else []))
    return variables


def command(
    triton: Triton,
    repository: Path,
    backends: Path | None,
    ports: Ports,
    region: str,
    exit_timeout_s: int,
    keys: Keys,
) -> list[str]:
    """The command line of the server. `region` begins the names of the backend's shared memory."""
    restricted = (
        ("model-repository,trace,logging", CONTROL_HEADER, keys.control),
        # Who may register shared memory may register any on this machine, Triton's own too.
        ("shared-memory", SHARED_MEMORY_HEADER, keys.shared_memory),
    )
    flags = {
        "model-repository": repository,
        "http-address": ports.host,
        "http-port": ports.http,
        "grpc-address": ports.host,
        "grpc-port": ports.grpc,
        "metrics-address": ports.host,
        "metrics-port": ports.metrics,
        # Explicit: the scheduler restarts a model that died. Clients cannot, without the key.
        "model-control-mode": "explicit",
        "load-model": "*",
        "strict-readiness": "true",
        "exit-timeout-secs": exit_timeout_s,
        "log-info": "false",
        "disable-auto-complete-config": None,
    }
    if backends is not None:
        flags["backend-directory"] = backends
    line = [str(triton.binary)]
    line += [f"--{name}" if value is None else f"--{name}={value}" for name, value in flags.items()]
    for apis, header, key in restricted:
        line += [f"--http-restricted-api={apis}:{header}={key}", f"--grpc-restricted-protocol={apis}:{header}={key}"]
    settings = {
        "thread-pool-size": THREAD_POOL,
        "stub-timeout-seconds": STUB_TIMEOUT_S,
        "shm-region-prefix-name": region,
    }
    return line + [f"--backend-config=python,{name}={value}" for name, value in settings.items()]


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _stub(package: Path) -> Path:
    return package / "python_backend_stubs" / _python() / "triton_python_backend_stub"


def _libraries(package: Path) -> Path:
    """The shared libraries that came with the wheel."""
    return package.parent.parent / "nvidia_pytriton.libs"
