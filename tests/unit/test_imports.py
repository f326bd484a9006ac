"""Who may import whom, read from the source of every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client", "scheduler", "python_backend", "launcher")
TRITON = ("tritonclient", "tritonserver", "triton_python_backend_utils", "pytriton")


def modules(*folders: str) -> list[Path]:
    """Every Python file below some folders, relative to the root."""
    return sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The full names that a module imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def offenders(paths: list[Path], *forbidden: str) -> dict[str, list[str]]:
    """The forbidden names that modules import, by module."""
    found = {}
    for path in paths:
        names = [name for name in imported(path) if any(f"{name}.".startswith(f"{each}.") for each in forbidden)]
        if names:
            found[str(path)] = sorted(names)
    return found


def is_acting(path: Path) -> bool:
    """Whether a module looks at the machine, which the rest of the scheduler must not."""
    return path.parts[:2] == ("scheduler", "topology")


def may_use_torch(path: Path) -> bool:
    """Whether a module computes."""
    folder, name = path.parent.as_posix(), path.name
    return (
        folder == "python_backend/decoder"
        or (folder == "python_backend/vision" and name not in ("preprocess.py", "stage.py", "onnx.py"))
        or path.as_posix()
        in (
            "python_backend/transport/device.py",
            "python_backend/weights.py",
            "python_backend/models/llava_decoder.py",
        )
    )


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("client", ("scheduler", "python_backend", "launcher")),
        ("scheduler", ("client", "python_backend", "launcher", "torch", "transformers", "onnxruntime", *TRITON)),
        ("python_backend", ("client", "launcher")),
    ],
)
def test_a_package_knows_only_those_below_it(package: str, forbidden: tuple[str, ...]) -> None:
    assert offenders(modules(package), *forbidden) == {}


def test_decisions_have_no_clock_and_no_chance_of_their_own() -> None:
    paths = [path for path in modules("scheduler") if not is_acting(path)]

    assert offenders(paths, "time", "random", "secrets", "datetime", "subprocess", "threading", "socket") == {}


def test_only_models_know_triton() -> None:
    paths = [path for path in modules("python_backend") if path.parts[1] != "models"]

    assert offenders(paths, *TRITON) == {}


def test_only_what_computes_imports_torch() -> None:
    paths = [path for path in modules(*PACKAGES) if not may_use_torch(path)]

    assert offenders(paths, "torch") == {}


def test_the_repositorys_models_are_one_import_each() -> None:
    paths = modules("model_repository")

    assert [str(path) for path in paths] == [
        "model_repository/clip_encoder/1/model.py",
        "model_repository/llava/1/model.py",
        "model_repository/llava_decoder/1/model.py",
    ]
    for path in paths:
        name = path.parts[1]
        assert (ROOT / path).read_text() == (
            f"from python_backend.models.{name} import TritonPythonModel as TritonPythonModel\n"
        )


def prints_or_reads_the_environment(path: Path) -> Iterator[str]:
    """Where a module calls `print`, or takes from the environment what should be an argument."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{path}:{node.lineno}: print"
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            yield f"{path}:{node.lineno}: os.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield f"{path}:{node.lineno}: from os import"


def test_only_commands_print_and_read_the_environment() -> None:
    # vLLM can be set up by environment variables only, so the one module that loads it writes some.
    paths = [path for path in modules(*PACKAGES) if path.name not in ("__main__.py", "vllm_engine.py")]

    assert [where for path in paths for where in prints_or_reads_the_environment(path)] == []


def test_tests_are_no_packages() -> None:
    assert [path for path in modules("tests") if path.name == "__init__.py"] == []
