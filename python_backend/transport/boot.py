"""One secret per start of the server, shared by all its processes through a file only their user can read.

All Python stubs of one tritonserver have the same parent. Its identity (process id, start time, process id
namespace) names the boot; the first stub that asks makes the key, the others read it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "vlm_relay."
KEY_BYTES = 32
STUB, STUB_SERVER = b"/triton_python_backend_stub", 5  # the process of a Python model, and which word is its server
BOOT_ID = re.compile(r"(?P<pid>[0-9]{1,10})-(?P<start>[0-9]{1,20})-(?P<namespace>[0-9]{1,10})")
_BOOT_FILE = re.compile(rf"vlm_relay\.(boot|pulse)\.(?P<id>{BOOT_ID.pattern})(\.[\w.-]{{1,200}})?")


@dataclass(frozen=True, slots=True)
class BootKey:
    """Which start of the server this is, and the secret that its processes share."""

    id: str
    key: bytes = field(repr=False)


def boot_key(parent_pid: int, directory: Path = SHARED_MEMORY) -> BootKey:
    """The key of the boot that process `parent_pid` began; makes it when no other process has yet.

    Pass `server_pid()`. Writes `vlm_relay.boot.<id>` (32 bytes, mode 0600) into `directory`; a reader never
    sees it half written, because it is linked to its name only when whole.

    Raises:
        ProcessLookupError: there is no such parent (it died, or lives in another process id namespace).
        PermissionError: the file at that name belongs to another user, is readable by others or malformed.
    """
    boot_id = identity(parent_pid)
    path = directory / f"{PREFIX}boot.{boot_id}"
    if not path.exists():
        _publish(path, secrets.token_bytes(KEY_BYTES))
    return BootKey(boot_id, _read(path))


def server_pid() -> int:
    """The tritonserver of this process. A stub's command line says it: its parent is another one once that died."""
    words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    return int(words[STUB_SERVER]) if words[0].endswith(STUB) else os.getppid()


def identity(parent_pid: int) -> str:
    """The name of the boot that `parent_pid` began: `<pid>-<start time in clock ticks>-<namespace>`.

    The start time tells a new process apart from an older one of the same number, the namespace tells apart
    containers that share one /dev/shm.

    Raises:
        ProcessLookupError: no such process here.
    """
    start = process_start(parent_pid)
    if start is None:
        raise ProcessLookupError(f"process {parent_pid}, the parent that names the boot, is not running")
    return f"{parent_pid}-{start}-{_namespace()}"


def process_start(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since the machine did; None when it is not running."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # After the command, which may hold spaces and brackets: state is field 3, start time field 22 (proc(5)).
    after_command = text[text.rindex(")") + 2 :].split()
    if after_command[0] in ("Z", "X", "x"):
        return None
    return int(after_command[19])


def is_alive(boot_id: str) -> bool:
    """Whether the boot's parent runs; True also for a boot of another namespace, which cannot be judged."""
    parts = BOOT_ID.fullmatch(boot_id)
    if parts is None:
        raise ValueError(f"not a boot id: {boot_id!r}")
    if int(parts["namespace"]) != _namespace():
        return True
    return process_start(int(parts["pid"])) == int(parts["start"])


def boot_of_file(name: str) -> str | None:
    """The boot id in the name of a key or pulse file (or of one left half made); None for any other name."""
    found = _BOOT_FILE.fullmatch(name)
    return None if found is None else found["id"]


def _namespace() -> int:
    """The number of this process's process id namespace; 0 where the kernel does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _publish(path: Path, key: bytes) -> None:
    """Put `key` at `path`, unless another process did first."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(file, 0o600)
            if os.write(file, key) != len(key):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft))
        finally:
            os.close(file)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _read(path: Path) -> bytes:
    """The key in the file at `path`, once its owner, mode and size are as `_publish` made them."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        refuse_foreign(file, path)
        key = os.read(file, KEY_BYTES + 1)
    finally:
        os.close(file)
    if len(key) != KEY_BYTES:
        raise PermissionError(f"{path} does not hold a key: {KEY_BYTES} bytes wanted, {len(key)} found")
    return key


def refuse_foreign(file: int, path: Path) -> os.stat_result:
    """The status of an open file that only its owner, this user, can read and write.

    Raises:
        PermissionError: not a plain file, another user's, or open to others.
    """
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError(f"{path} is not a plain file")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if status.st_mode & 0o077:
        raise PermissionError(f"{path} is open to others: mode {stat.S_IMODE(status.st_mode):04o}, not 0600")
    return status
