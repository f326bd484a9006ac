"""The two files of a batch: where each input line stands, and the output that survives a kill."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


class BatchRefused(ValueError):
    """A file that cannot be used as it is; the message names it, and the line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the input; only its place is kept, since it may carry images."""

    custom_id: str
    offset: int
    number: int


def index(path: Path) -> list[Entry]:
    """Every line of the input that is not blank.

    Raises:
        BatchRefused: no such file, a line that is no JSON object, or a `custom_id` that stands there twice.
    """
    entries: dict[str, Entry] = {}
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    entry = Entry(_custom_id(line, f"{path}:{number}", number), offset, number)
                    before = entries.setdefault(entry.custom_id, entry)
                    if before is not entry:
                        raise BatchRefused(
                            f"{path}:{number}: custom_id {entry.custom_id!r} stands in line {before.number} too"
                        )
                offset += len(line)
    except OSError as error:
        raise BatchRefused(f"{path}: {error.strerror}") from error
    return list(entries.values())


def read_entry(path: Path, entry: Entry) -> Mapping[str, object]:
    """The object in an entry's line."""
    with path.open("rb") as file:
        file.seek(entry.offset)
        return _object(file.readline(), f"{path}:{entry.number}")


class Output:
    """The output file, of one process at a time; `done` are the ids that have their line.

    Opening it cuts off a torn last line, which only a kill or a full disk leaves.
    """

    def __init__(self, path: Path, known_ids: set[str]) -> None:
        """Open or create the file.

        Raises:
            BatchRefused: another process writes it, or it holds what this batch cannot have written.
        """
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise BatchRefused(f"{path}: {error.strerror}") from error
        try:
            self._lock(path)
            self.done = self._read_back(path, known_ids)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def append(self, value: Mapping[str, object]) -> None:
        """Write one line; it is on the disk when this returns."""
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchRefused(f"{path}: another batch is writing it") from None

    def _read_back(self, path: Path, known_ids: set[str]) -> frozenset[str]:
        done: set[str] = set()
        end = 0
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # torn
                where = f"{path}:{number}"
                custom_id = _custom_id(line, where, 0)
                if custom_id not in known_ids or custom_id in done:
                    raise BatchRefused(f"{where}: {custom_id!r} is not of this batch; choose another output file")
                done.add(custom_id)
                end += len(line)
        os.ftruncate(self._file, end)
        return frozenset(done)


def _custom_id(line: bytes, where: str, number: int) -> str:
    custom_id = _object(line, where).get("custom_id", f"line-{number}")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchRefused(f"{where}: custom_id must be a string, not {custom_id!r}")
    return custom_id


def _object(line: bytes, where: str) -> Mapping[str, object]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BatchRefused(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BatchRefused(f"{where}: must be a JSON object")
    return value
