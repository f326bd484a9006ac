"""The janitor: what the dead left goes, what the living hold stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from python_backend.transport.boot import BootKey, identity
from python_backend.transport.janitor import remove_orphans
from python_backend.transport.segment import Segment

if TYPE_CHECKING:
    from tests.unit.transport.conftest import Peer


def test_an_orphan_is_removed_and_a_live_segment_never(
    shared_memory: Path, segment: Segment, new_peer: Callable[[], Peer]
) -> None:
    dead, live = new_peer(), new_peer()
    orphan, kept = dead.ask("create"), live.ask("create")
    assert remove_orphans(shared_memory) == []
    dead.kill()
    assert remove_orphans(shared_memory) == [orphan]
    assert {orphan, kept, segment.name} - {entry.name for entry in shared_memory.iterdir()} == {orphan}
    live.ask("close")


def test_a_reader_does_not_keep_an_orphan_alive(shared_memory: Path, new_peer: Callable[[], Peer]) -> None:
    owner, reader = new_peer(), new_peer()
    orphan = owner.ask("create")
    assert reader.ask("attach", orphan) == "attached"
    owner.kill()
    assert reader.ask("sweep") == orphan


def test_the_key_of_a_dead_boot_is_removed_and_a_live_one_never(shared_memory: Path, boot: BootKey) -> None:
    pid, start, namespace = identity(os.getpid()).split("-")
    dead = shared_memory / f"vlm_relay.boot.{pid}-{int(start) + 1}-{namespace}"
    dead.write_bytes(bytes(32))
    half_made = dead.with_name(dead.name + ".0123456789abcdef")
    half_made.write_bytes(b"")
    for path in (dead, half_made):
        path.chmod(0o600)
    assert remove_orphans(shared_memory) == [dead.name, half_made.name]
    assert [entry.name for entry in shared_memory.iterdir()] == [f"vlm_relay.boot.{boot.id}"]


def test_files_of_others_are_left_alone(shared_memory: Path, boot: BootKey) -> None:
    segment_like = f"vlm_relay.{boot.id}.0123456789abcdef"
    names = ["other", "vlm_relay.notes", f"x{segment_like}", f"{segment_like}.bak", segment_like]
    for name in names:
        (shared_memory / name).write_bytes(b"")
        (shared_memory / name).chmod(0o644)  # ours are 0600
    (shared_memory / f"vlm_relay.{boot.id}.fedcba9876543210").symlink_to(shared_memory / "other")
    assert remove_orphans(shared_memory) == []
    for path in shared_memory.iterdir():
        path.unlink()
