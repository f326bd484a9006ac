"""Where everything lies in a segment: pure arithmetic, the same for its creator and its readers.

    0                  facts      8 words of 8 bytes: magic, layout version, slots, slot bytes, leases,
                                  is open (1, or 0 once closed), memory, spare   readers: read only
    64                 export     how to open the slots on a device: CUDA's IPC handle (64 bytes) and the
                                  device's UUID (16); zeros for slots in host memory
    144                generation one word per slot: even = stable, odd = being written
    144 + 8 slots      granted    one word per lease: the id that holds it, or 0
       ... next page boundary
    returned_offset    returned   one word per lease: the id given back last     readers: read and write
       ... next page boundary
    slots_offset       slot 0     slot bytes rounded up to 4096                  readers: read only
                       slot 1
                       ...

The three areas start on pages of their own because each is mapped with its own rights. With memory "device" the
slots are on a GPU, at the same strides, and the third area is missing; with "both" they are on a GPU and, for readers
that cannot open that, in the third area too.
"""

from __future__ import annotations

import mmap
import re
import secrets
from dataclasses import dataclass
from typing import Final, Literal, get_args

from python_backend.transport.boot import BOOT_ID, PREFIX

Memory = Literal["host", "device", "both"]
_MEMORIES: Final[tuple[Memory, ...]] = get_args(Memory)

LAYOUT_VERSION = 2
MAGIC = int.from_bytes(b"VLMRELAY", "little")
WORD_BYTES = 8
SLOT_ALIGNMENT_BYTES = 4096
# Some ARM kernels have pages of 64 KiB, and a map must start on a page.
AREA_ALIGNMENT_BYTES = max(SLOT_ALIGNMENT_BYTES, mmap.ALLOCATIONGRANULARITY)
NUM_FACTS = 8
IS_OPEN = 5  # the word of the facts that turns 0 when the creator closes
NUM_EXPORT_WORDS = 10
EXPORT_BYTES = NUM_EXPORT_WORDS * WORD_BYTES
EXPORT_OFFSET = NUM_FACTS * WORD_BYTES

_SEGMENT_NAME = re.compile(rf"vlm_relay\.(?P<boot>{BOOT_ID.pattern})\.[0-9a-f]{{16}}")
SEGMENT_NAME_BYTES = 64  # the longest name a handle has room for


def segment_name(boot_id: str) -> str:
    """A fresh name for a segment of that boot; nobody can guess it."""
    name = f"{PREFIX}{boot_id}.{secrets.token_hex(8)}"
    if boot_of_segment(name) is None:
        raise ValueError(f"not a boot id: {boot_id!r}")
    return name


def boot_of_segment(name: str) -> str | None:
    """The boot id in a segment's name; None for anything that is not such a name, paths above all."""
    if len(name) > SEGMENT_NAME_BYTES:
        return None
    found = _SEGMENT_NAME.fullmatch(name)
    return None if found is None else found["boot"]


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The sizes of a segment, and the offsets that follow from them, in bytes from its start."""

    num_slots: int
    slot_bytes: int
    num_leases: int
    memory: Memory = "host"

    def __post_init__(self) -> None:
        for name in ("num_slots", "slot_bytes", "num_leases"):
            value = getattr(self, name)
            if not 0 < value < 1 << 40:
                raise ValueError(f"segment with {name} = {value}: must be positive and below 2**40")

    @property
    def generation_word(self) -> int:
        """The first word of the generations."""
        return NUM_FACTS + NUM_EXPORT_WORDS

    @property
    def granted_word(self) -> int:
        """The first word of the granted lease ids."""
        return self.generation_word + self.num_slots

    @property
    def control_bytes(self) -> int:
        """Length of the area with facts, generations and granted ids; also where `returned` starts."""
        return _align(WORD_BYTES * (self.granted_word + self.num_leases), AREA_ALIGNMENT_BYTES)

    @property
    def returned_bytes(self) -> int:
        """Length of the area with the returned lease ids."""
        return _align(WORD_BYTES * self.num_leases, AREA_ALIGNMENT_BYTES)

    @property
    def slots_offset(self) -> int:
        """Where slot 0 starts."""
        return self.control_bytes + self.returned_bytes

    @property
    def slot_stride_bytes(self) -> int:
        """From the start of one slot to the next."""
        return _align(self.slot_bytes, SLOT_ALIGNMENT_BYTES)

    @property
    def slots_bytes(self) -> int:
        """Length of all slots together, wherever they are."""
        return self.num_slots * self.slot_stride_bytes

    @property
    def total_bytes(self) -> int:
        """Length of the whole segment in host memory."""
        return self.slots_offset + (0 if self.memory == "device" else self.slots_bytes)

    def slot_offset(self, slot: int) -> int:
        """Where slot number `slot` starts; of slots on a device, where it would."""
        return self.slots_offset + slot * self.slot_stride_bytes

    def facts(self) -> tuple[int, ...]:
        """The words that a reader finds at the start of the segment, as long as it is open."""
        memory = _MEMORIES.index(self.memory)
        return (MAGIC, LAYOUT_VERSION, self.num_slots, self.slot_bytes, self.num_leases, 1, memory, 0)

    @classmethod
    def from_facts(cls, facts: tuple[int, ...], total_bytes: int) -> SegmentLayout:
        """The layout that the first words of a segment of `total_bytes` tell.

        Raises:
            ValueError: not a segment, of another layout version, or shorter than its layout needs.
        """
        magic, version, num_slots, slot_bytes, num_leases, _, memory = facts[:7]
        if magic != MAGIC:
            raise ValueError("not an embedding segment")
        if version != LAYOUT_VERSION:
            raise ValueError(f"layout version {version}, this process knows {LAYOUT_VERSION}")
        if memory >= len(_MEMORIES):
            raise ValueError(f"memory of kind {memory}; known: {', '.join(_MEMORIES)}")
        layout = cls(num_slots, slot_bytes, num_leases, _MEMORIES[memory])
        if layout.total_bytes > total_bytes:
            raise ValueError(f"{total_bytes} bytes, its layout needs {layout.total_bytes}")
        return layout


def _align(size_bytes: int, to_bytes: int) -> int:
    return -(-size_bytes // to_bytes) * to_bytes
