"""Gathers what a bare GPU machine needs beside this repository into one archive, small enough to carry.

    python -m tests.device.pack FOLDER [--python 3.12]        # writes FOLDER/site.tar.xz

The real tritonserver out of the `nvidia-pytriton` wheel (without its examples, clients and other Pythons' stubs), and
the few packages that a machine with torch and transformers may lack. On that machine:

    mkdir -p /tmp/site && tar -xJf FOLDER/site.tar.xz -C /tmp/site
    PYTHONPATH=/tmp/site:. python3 -m tests.device.check --out device.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# numpy 2 makes the stub of Triton 2.51 abort on the first BYTES tensor.
PACKAGES = (
    *("numpy==1.26.4", "pydantic==2.14.4", "pydantic_core==2.50.5", "annotated-types==0.7.0"),
    *("typing-inspection==0.4.5", "tritonclient==2.73.0", "python-rapidjson==1.25"),
)
SERVER = "nvidia-pytriton==0.7.0"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux_2_35_x86_64",
    "manylinux_2_24_x86_64",
    "any",
)
LIMIT_MIB = 52


def main(argv: list[str] | None = None) -> int | str:
    """Writes the archive; an exit code, or what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.device.pack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12")
    given = parser.parse_args(argv)
    given.folder.mkdir(parents=True, exist_ok=True)
    archive = given.folder / "site.tar.xz"
    with tempfile.TemporaryDirectory() as name:
        wheels, site = Path(name, "wheels"), Path(name, "site")
        site.mkdir()
        for package in (*PACKAGES, SERVER):
            download(package, wheels, given.python)
        for wheel in sorted(wheels.glob("*.whl")):
            is_server = wheel.name.startswith("nvidia_pytriton")
            unpack(wheel, site, given.python if is_server else None)
        subprocess.run(["tar", "-C", str(site), "-I", "xz -6 -T2", "-cf", str(archive), "."], check=True)
    size_mib = archive.stat().st_size / (1 << 20)
    print(f"{archive}: {size_mib:.1f} MiB")
    return 0 if size_mib <= LIMIT_MIB else f"{archive} is {size_mib:.0f} MiB; allowed: {LIMIT_MIB}"


def download(package: str, folder: Path, python: str) -> None:
    """One wheel for the machine's Python."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, package], check=True)


def unpack(wheel: Path, site: Path, server_python: str | None) -> None:
    """A wheel into the folder; of the server's only what serves Python models on that Python."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.is_dir() or (server_python is not None and not is_wanted(entry.filename, server_python)):
                continue
            target = Path(archive.extract(entry, site))
            target.chmod(0o755 if entry.external_attr >> 16 & 0o111 else 0o644)


def is_wanted(name: str, python: str) -> bool:
    """Whether a file of the server's wheel is needed."""
    if name.startswith("pytriton/tritonserver/"):
        inside = name.removeprefix("pytriton/tritonserver/")
        stubs = "python_backend_stubs/"
        if inside.startswith(stubs):
            return inside.startswith(f"{stubs}{python}/")
        return inside.startswith(("bin/tritonserver", "backends/python/", "lib/", "external_libs/"))
    if "libpython3" in name:  # each stub's own interpreter
        return f".{python.partition('.')[2]}.so" in name
    return name.startswith(("nvidia_pytriton.libs/", "nvidia_pytriton-")) or name == "pytriton/__init__.py"


if __name__ == "__main__":
    sys.exit(main())
