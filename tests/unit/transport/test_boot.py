"""The secret of a boot: one for all its processes, for nobody else."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from python_backend.transport.boot import BootKey, boot_key, identity, is_alive, process_start

if TYPE_CHECKING:
    from tests.unit.transport.conftest import Peer


def test_all_processes_of_a_boot_share_one_key(
    shared_memory: Path, boot: BootKey, new_peer: Callable[[], Peer]
) -> None:
    expected = f"{boot.id} {hashlib.sha256(boot.key).hexdigest()}"
    assert [new_peer().ask("boot"), new_peer().ask("boot")] == [expected, expected]


def test_processes_that_start_together_agree_on_the_key(shared_memory: Path, new_peer: Callable[[], Peer]) -> None:
    peers = [new_peer() for _ in range(4)]
    assert len({peer.ask("boot") for peer in peers}) == 1
    assert [entry.name for entry in shared_memory.iterdir()] == [f"vlm_relay.boot.{identity(os.getppid())}"]


def test_the_second_to_publish_a_key_takes_the_first_one(
    shared_memory: Path, boot: BootKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as seen before the first had published
    assert boot_key(os.getppid(), shared_memory) == boot
    assert len(list(shared_memory.iterdir())) == 1


def test_another_parent_is_another_boot(shared_memory: Path, boot: BootKey) -> None:
    other = boot_key(os.getpid(), shared_memory)
    assert other.id != boot.id
    assert other.key != boot.key


def test_the_key_file_is_for_its_user_only(shared_memory: Path, boot: BootKey) -> None:
    status = (shared_memory / f"vlm_relay.boot.{boot.id}").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_size) == (0o600, 32)


def test_the_key_does_not_show_in_logs(boot: BootKey) -> None:
    assert boot.key.hex() not in repr(boot)
    assert repr(boot.key) not in repr(boot)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.chmod(0o644), "open to others: mode 0644"),
        (lambda path: path.write_bytes(b"short"), "32 bytes wanted, 5 found"),
        (lambda path: path.write_bytes(bytes(33)), "32 bytes wanted, 33 found"),
        (lambda path: (path.unlink(), path.mkdir(0o700)), "not a plain file"),
    ],
)
def test_a_key_file_that_others_could_have_made_is_refused(
    shared_memory: Path, boot: BootKey, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(shared_memory / f"vlm_relay.boot.{boot.id}")
    with pytest.raises(PermissionError, match=message):
        boot_key(os.getppid(), shared_memory)


def test_a_link_in_place_of_the_key_file_is_not_followed(shared_memory: Path, boot: BootKey) -> None:
    path = shared_memory / f"vlm_relay.boot.{boot.id}"
    path.rename(shared_memory / "vlm_relay.boot.elsewhere")
    path.symlink_to(shared_memory / "vlm_relay.boot.elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        boot_key(os.getppid(), shared_memory)


def test_a_parent_that_is_not_running_names_no_boot(shared_memory: Path) -> None:
    with pytest.raises(ProcessLookupError, match="process 0, the parent that names the boot"):
        boot_key(0, shared_memory)


def test_a_process_of_the_same_number_but_another_start_is_another_boot() -> None:
    pid, start, namespace = identity(os.getpid()).split("-")
    assert int(start) == process_start(os.getpid())
    assert is_alive(f"{pid}-{start}-{namespace}")
    assert not is_alive(f"{pid}-{int(start) + 1}-{namespace}")


def test_a_boot_of_another_container_is_never_taken_for_dead() -> None:
    assert is_alive("4194303-1-1")
