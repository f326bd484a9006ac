"""What a command may write to."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from scheduler.output_file import output_file, output_file_or_dash


def test_asking_changes_nothing(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("kept")

    assert output_file(str(there)) == there
    assert output_file(str(tmp_path / "new")) == tmp_path / "new"
    assert output_file_or_dash("-") == "-"

    assert there.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("missing/x", "the folder does not exist"),
        ("file/x", "Not a directory"),
        ("", "Is a directory"),
        ("/proc/x", "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_refused(
    told: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()

    with pytest.raises(argparse.ArgumentTypeError) as refused:
        output_file(told)

    assert str(refused.value) == f"cannot write {told!r}: {reason}"
