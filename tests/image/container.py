"""Builds and runs the image with buildah and podman, in a storage of its own; root only, no daemon."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORAGE = ROOT / "build" / "containers"
BASE, IMAGE = "localhost/vlm-relay-standin", "localhost/vlm-relay"
PACKAGES = "python3,python3-venv,libpython3.11,ca-certificates,libgomp1,libstdc++6"
# Where pip looks on this machine; the build sees them, the image does not keep them.
PIP_PLACES = ("/etc/pip.conf", "/root/.config/pip/pip.conf", "/opt/wheels", "/opt/pypi", "/etc/ssl/certs")


def _storage(*more: str) -> list[str]:
    return ["--storage-driver", "overlay", "--root", f"{STORAGE}/root", "--runroot", f"{STORAGE}/run", *more]


def run(command: list[str], timeout_s: float, is_checked: bool = True) -> subprocess.CompletedProcess[str]:
    """A command's result, its output as text."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    assert not is_checked or done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
    return done


def buildah(*words: str, timeout_s: float = 120) -> str:
    """What buildah prints."""
    return run(["buildah", *_storage(), *words], timeout_s).stdout.strip()


def podman(*words: str, timeout_s: float = 120, is_checked: bool = True) -> subprocess.CompletedProcess[str]:
    """What podman does."""
    more = ("--tmpdir", f"{STORAGE}/tmp", "--runtime", "runc", "--cgroup-manager", "cgroupfs")
    return run(["podman", *_storage(*more), *words], timeout_s, is_checked)


def build_base() -> None:
    """A small Debian with Python, standing in for NVIDIA's image, which has to be pulled."""
    if run(["buildah", *_storage(), "images", "-q", BASE], 60, is_checked=False).stdout.strip():
        return
    tar = STORAGE / "base.tar"
    STORAGE.mkdir(parents=True, exist_ok=True)
    run(["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(tar)], 900)
    container = buildah("from", "scratch")
    buildah("add", "-q", container, str(tar), "/")
    buildah("commit", "-q", container, BASE, timeout_s=300)
    buildah("rm", container)
    tar.unlink()


def build_image() -> None:
    """The shipped Dockerfile on the stand-in base, with PyPI's server."""
    places = [place for place in PIP_PLACES if Path(place).exists()]
    mounts = [word for place in places for word in ("--volume", f"{place}:{place}:ro")]
    arguments = ["--build-arg", f"BASE={BASE}", "--build-arg", "EXTRAS=server,gateway,tracing"]
    options = ["--isolation", "chroot", "--network", "host", "--file", "docker/Dockerfile", "--tag", IMAGE]
    command = ["buildah", *_storage(), "bud", "--quiet", *options, *arguments, *mounts, str(ROOT)]
    run(command, 1500)


@contextmanager
def container(name: str, *command: str, **variables: str) -> Iterator[str]:
    """A running container, hardened as the compose file has it; removed at the end."""
    options = ["--user", "12345:0", "--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
    options += ["--shm-size", "256m", "--tmpfs", "/tmp:mode=1777,size=512m", "--network", "host"]
    options += ["--ulimit", "nofile=8192:8192", "--ulimit", "nproc=4096:4096"]
    for key, value in {"VLM_RELAY_HOST": "127.0.0.1", **variables}.items():
        options += ["--env", f"{key}={value}"]
    podman("rm", "--force", "--time", "0", name, is_checked=False)
    podman("run", "--detach", "--name", name, *options, IMAGE, *command)
    try:
        yield name
    finally:
        podman("rm", "--force", "--time", "0", name, is_checked=False)


def state(name: str) -> dict[str, object]:
    """Podman's word on a container."""
    found = json.loads(podman("inspect", name).stdout)[0]["State"]
    return {"status": found["Status"], "exit_code": found["ExitCode"]}


def logs(name: str) -> str:
    """What it printed."""
    done = podman("logs", name, is_checked=False)
    return done.stdout + done.stderr


def is_possible() -> bool:
    """Whether this machine has what it takes."""
    return os.geteuid() == 0 and all(
        any((Path(folder) / tool).exists() for folder in os.environ["PATH"].split(":"))
        for tool in ("buildah", "podman", "runc", "mmdebstrap")
    )
