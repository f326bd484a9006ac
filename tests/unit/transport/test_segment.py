"""Segments: taken whole, readable by their user only, unlinked by their creator only."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from python_backend.errors import EmbeddingGone, Overloaded
from python_backend.transport.boot import SHARED_MEMORY, BootKey
from python_backend.transport.janitor import remove_orphans
from python_backend.transport.layout import SegmentLayout
from python_backend.transport.segment import Segment, try_lock

if TYPE_CHECKING:
    from tests.unit.transport.conftest import Peer

LAYOUT = SegmentLayout(num_slots=3, slot_bytes=5000, num_leases=6)
FLOAT16 = np.dtype(np.float16)


def test_only_the_creator_unlinks(segment: Segment, new_peer: Callable[[], Peer]) -> None:
    peer = new_peer()
    assert peer.ask("attach", segment.name) == "attached"
    attached = Segment.attach(segment.name, segment.path.parent)
    attached.close()
    peer.kill()
    assert segment.path.exists()
    segment.close()
    assert not segment.path.exists()


def test_a_forked_child_of_the_creator_does_not_unlink(segment: Segment) -> None:
    child = os.fork()
    if child == 0:
        segment.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (segment.path.exists(), segment.is_open) == (True, True)


def test_closing_twice_does_no_harm(segment: Segment) -> None:
    segment.close()
    segment.close()
    assert not segment.path.exists()


def test_a_closed_segment_tells_its_readers(segment: Segment) -> None:
    attached = Segment.attach(segment.name, segment.path.parent)
    segment.close()
    assert not attached.is_open
    with pytest.raises(EmbeddingGone, match=f"{segment.name} is gone: its owner closed or died"):
        Segment.attach(segment.name, segment.path.parent)


def test_attaching_after_the_death_of_the_creator_fails_clearly(
    shared_memory: Path, new_peer: Callable[[], Peer]
) -> None:
    owner = new_peer()
    name = owner.ask("create")
    owner.kill()
    with pytest.raises(EmbeddingGone, match=f"{name} is gone: its owner died"):
        Segment.attach(name, shared_memory)
    (shared_memory / name).unlink()


@pytest.mark.parametrize("mask", [0, 0o777])
def test_the_file_is_for_its_user_only_whatever_the_umask(shared_memory: Path, boot: BootKey, mask: int) -> None:
    umask = os.umask(mask)
    try:
        segment = Segment.create(boot.id, LAYOUT, shared_memory)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600
    segment.path.chmod(0o640)
    with pytest.raises(PermissionError, match="open to others: mode 0640"):
        Segment.attach(segment.name, shared_memory)
    segment.close()


def test_all_memory_is_taken_at_creation(shared_memory: Path, boot: BootKey) -> None:
    segment = Segment.create(boot.id, LAYOUT, shared_memory)
    status = segment.path.stat()
    assert (status.st_size, status.st_blocks * 512) == (LAYOUT.total_bytes, LAYOUT.total_bytes)
    segment.close()


def test_a_janitor_that_comes_between_making_and_locking_the_file_does_no_harm(
    shared_memory: Path, boot: BootKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    def lock_after_janitor(file: int, kind: int) -> bool:
        if not removed:
            removed.extend(remove_orphans(shared_memory))
        return try_lock(file, kind)

    monkeypatch.setattr("python_backend.transport.segment.try_lock", lock_after_janitor)
    segment = Segment.create(boot.id, LAYOUT, shared_memory)
    assert (len(removed), segment.name in removed, segment.path.exists()) == (1, False, True)
    segment.close()


def test_by_default_a_segment_lies_in_dev_shm(boot: BootKey) -> None:
    segment = Segment.create(boot.id, LAYOUT)
    assert (SHARED_MEMORY / segment.name).exists()
    segment.close()
    assert not (SHARED_MEMORY / segment.name).exists()


def test_areas_and_slots_start_on_pages() -> None:
    starts = [LAYOUT.control_bytes, LAYOUT.slots_offset, *(LAYOUT.slot_offset(slot) for slot in range(3))]
    assert [start % 4096 for start in starts] == [0, 0, 0, 0, 0]
    assert LAYOUT.slot_offset(2) - LAYOUT.slot_offset(1) == 8192
    assert LAYOUT.total_bytes == LAYOUT.slot_offset(3)


def test_a_reader_cannot_write_what_the_owner_writes(segment: Segment) -> None:
    attached = Segment.attach(segment.name, segment.path.parent)
    view = attached.view(0, (4, 8), FLOAT16)
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    for words in (attached.generation, attached.granted):
        with pytest.raises(TypeError, match="read-only"):
            words[0] = 1
    attached.returned[0] = 7
    assert segment.returned[0] == 7


@pytest.mark.parametrize(
    ("slot", "shape", "message"),
    [
        (3, (1, 1), "has 3 slots"),
        (-1, (1, 1), "has 3 slots"),
        (0, (0, 8), "slot 0 with shape"),
        (0, (-4, -8), "slot 0 with shape"),
        (0, (4, 9), "takes 72 bytes, a slot of .* has 64"),
    ],
)
def test_no_view_leaves_its_slot(segment: Segment, slot: int, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segment.view(slot, shape, FLOAT16)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ENOMEM, errno.EDQUOT])
def test_a_full_file_system_is_a_clear_error_and_leaves_no_file(
    shared_memory: Path, boot: BootKey, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(file: int, offset: int, length: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(Overloaded, match=rf"{LAYOUT.total_bytes} bytes wanted, \d+ free \({os.strerror(error)}"):
        Segment.create(boot.id, LAYOUT, shared_memory)
    assert not list(shared_memory.glob(f"vlm_relay.{boot.id}.*"))


def test_a_limit_on_the_file_size_is_a_clear_error_and_leaves_no_file(shared_memory: Path, boot: BootKey) -> None:
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from python_backend.transport.layout import SegmentLayout\n"
        "from python_backend.transport.segment import Segment\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "Segment.create(sys.argv[1], SegmentLayout(3, 5000, 6), Path(sys.argv[2]))\n"
    )
    root = Path(__file__).resolve().parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", script, boot.id, str(shared_memory)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert f"[UNAVAILABLE] no room for an embedding segment in {shared_memory}: {LAYOUT.total_bytes}" in (ended.stderr)
    assert not list(shared_memory.glob(f"vlm_relay.{boot.id}.*"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../../etc/passwd",
        "vlm_relay.1-2-3.0123456789abcdef/../x",
        "vlm_relay.1-2-3.0123456789abcdef\n",
        "vlm_relay.1-2-3.0123456789ABCDEF",
        "vlm_relay.boot.1-2-3",
        "/dev/shm/vlm_relay.1-2-3.0123456789abcdef",
        "vlm_relay.१-2-3.0123456789abcdef",
    ],
)
def test_only_the_names_of_segments_are_opened(shared_memory: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of an embedding segment"):
        Segment.attach(name, shared_memory)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"x", "not an embedding segment"),
        (8, b"\x03", "layout version 3, this process knows 2"),
        (48, b"\x03", "memory of kind 3; known: host, device, both"),
        (16, b"\xff", "its layout needs"),
        (16, b"\0" * 8, "num_slots = 0"),
        (16, b"\xff" * 8, "must be positive and below"),
    ],
)
def test_a_file_that_is_no_whole_segment_is_refused(segment: Segment, offset: int, data: bytes, message: str) -> None:
    file = os.open(segment.path, os.O_RDWR)
    os.pwrite(file, data, offset)
    os.close(file)
    with pytest.raises(ValueError, match=message):
        Segment.attach(segment.name, segment.path.parent)


def test_a_link_in_place_of_a_segment_is_not_followed(segment: Segment) -> None:
    link = segment.path.with_name(segment.name[:-16] + "0" * 16)
    link.symlink_to(segment.path)
    with pytest.raises(OSError, match="symbolic links"):
        Segment.attach(link.name, link.parent)
    link.unlink()
