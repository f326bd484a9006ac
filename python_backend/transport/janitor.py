"""Removes what dead processes left in shared memory, and never anything of a live one.

Triton does not call `finalize` in a stub that crashed, so every stage calls this when it starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from python_backend.transport.boot import PREFIX, SHARED_MEMORY, boot_of_file, is_alive, refuse_foreign
from python_backend.transport.layout import boot_of_segment
from python_backend.transport.segment import try_lock


def remove_orphans(directory: Path = SHARED_MEMORY, prefix: str = PREFIX) -> list[str]:
    """The names it removed, sorted: segments whose creator and boot keys whose parent is dead.

    Looks only at plain files of this user whose name begins with `prefix` and is that of a segment or of a
    boot key. Safe to run in any number of processes at once, and beside other servers.
    """
    names = sorted(entry.name for entry in os.scandir(directory) if entry.name.startswith(prefix))
    return [name for name in names if _is_removed(directory / name)]


def _is_removed(path: Path) -> bool:
    """Remove the file at `path` if it is an orphan of ours, and say whether it was."""
    boot_id = boot_of_file(path.name)
    if boot_id is None and boot_of_segment(path.name) is None:
        return False
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, another user's, or a link
        return False
    try:
        status = refuse_foreign(file, path)
        is_orphan = not is_alive(boot_id) if boot_id is not None else try_lock(file, fcntl.LOCK_EX)
        # Gone already means another janitor was faster; names are random and never used again.
        if not is_orphan or status.st_nlink == 0:
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            return True
        return False
    except PermissionError:
        return False
    finally:
        os.close(file)
