"""The completion script, asked by a real shell."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _script(shell: str) -> str:
    command = [sys.executable, "-m", "launcher", "completion", shell]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash, in a file."""
    path = tmp_path_factory.mktemp("completion") / "vlm-relay.bash"
    path.write_text(_script("bash"))
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ba"], {"batch"}),
        (["gateway", "--image-h"], {"--image-host"}),
        (["completion", ""], {"bash", "zsh", "fish", "tcsh"}),
        (["batch", "pic"], {"pictures", "picture.jpg"}),
        (["ask", "picture."], {"picture.jpg"}),
        (["serve", "--checkpoint", "pict"], {"pictures"}),
        (["serve", "--profile", "picture."], {"picture.jpg"}),
    ],
)
def test_bash_completes_commands_options_files_and_folders(
    bash: Path, tmp_path: Path, words: list[str], expected: set[str]
) -> None:
    (tmp_path / "picture.jpg").touch()
    (tmp_path / "pictures").mkdir()
    asked = " ".join(f"'{word}'" for word in ["vlm-relay", *words])
    program = (
        f"source {bash}; COMP_WORDS=({asked}); COMP_CWORD={len(words)}; COMP_TYPE=9; COMP_KEY=9\n"
        f"_shtab_vlm_relay vlm-relay '{words[-1]}' '{words[-2] if len(words) > 1 else 'vlm-relay'}'\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )

    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)

    assert expected <= set(done.stdout.split()), done.stderr
    assert all(word.startswith(words[-1]) for word in done.stdout.split())


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_get_a_script_that_knows_the_commands(shell: str) -> None:
    script = _script(shell)

    assert "vlm-relay" in script
    assert "gateway" in script
    if shutil.which(shell) and shell != "tcsh":
        subprocess.run([shell, "-n"], input=script, text=True, timeout=30, check=True)
