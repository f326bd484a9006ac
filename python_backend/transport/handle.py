"""What travels instead of an embedding: where it lies, which one it is, and a seal that cannot be forged.

0    magic "VLMH"
4    version u16, dtype u8, spare u8
8    slot u32, lease index u32, rows u32, width u32
24   offset u64, generation u64, lease id u64
48   content digest 16, fingerprint 16
80   segment name, padded with zeros to 64
144  MAC 32: keyed blake2b over all before it       176 bytes in all, little endian
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from python_backend.errors import HandleRefused
from python_backend.transport.boot import BootKey
from python_backend.transport.layout import LAYOUT_VERSION, SEGMENT_NAME_BYTES, boot_of_segment

DType = Literal["float16", "float32", "bfloat16"]

# numpy has no bfloat16: its 16 bits are carried as uint16, and the decoder looks at them as what they are.
NUMPY_DTYPES: Final[dict[DType, np.dtype[np.generic]]] = {
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
}

HANDLE_VERSION: Final = 1
DIGEST_BYTES: Final = 16
_MAGIC: Final = b"VLMH"
_BODY: Final = struct.Struct(f"<4sHBx4I3Q{DIGEST_BYTES}s{DIGEST_BYTES}s{SEGMENT_NAME_BYTES}s")
_MAC_BYTES: Final = 32
HANDLE_BYTES: Final = _BODY.size + _MAC_BYTES
_DTYPES: Final[tuple[DType, ...]] = get_args(DType)


@dataclass(frozen=True, slots=True)
class EmbeddingHandle:
    """One lease on one embedding (rows, width) in a slot of a segment.

    `offset` is in bytes from the start of the segment, `digest` is the content it was made from,
    `fingerprint` the model, preprocessing and layout that made it (`fingerprint_of`); 16 bytes each.
    """

    segment: str
    slot: int
    offset: int
    shape: tuple[int, int]
    dtype: DType
    generation: int
    lease_index: int
    lease_id: int
    digest: bytes
    fingerprint: bytes
    version: int = HANDLE_VERSION

    @property
    def num_bytes(self) -> int:
        """Size of the embedding behind the handle."""
        return self.shape[0] * self.shape[1] * NUMPY_DTYPES[self.dtype].itemsize

    def seal(self, boot: BootKey) -> bytes:
        """The handle as `HANDLE_BYTES` bytes that only processes of this boot can make or open."""
        body = _BODY.pack(
            _MAGIC,
            self.version,
            _DTYPES.index(self.dtype),
            self.slot,
            self.lease_index,
            *self.shape,
            self.offset,
            self.generation,
            self.lease_id,
            self.digest,
            self.fingerprint,
            self.segment.encode("ascii"),
        )
        return body + _mac(body, boot)

    @classmethod
    def open(cls, data: bytes, boot: BootKey, fingerprint: bytes) -> EmbeddingHandle:
        """The handle in `data`, once it is certain that this boot sealed it, for this model.

        Looks at nothing but the bytes; whether the embedding is still there is for `EmbeddingReader` to say.

        Raises:
            HandleRefused: of another length, no handle, forged or damaged, or of another boot, version or
                model.
        """
        if len(data) != HANDLE_BYTES:
            raise HandleRefused(f"an embedding handle has {HANDLE_BYTES} bytes, this has {len(data)}")
        body, mac = data[: _BODY.size], data[_BODY.size :]
        if not hmac.compare_digest(_mac(body, boot), mac):
            if body[: len(_MAGIC)] != _MAGIC:
                raise HandleRefused("these bytes are not an embedding handle")
            raise HandleRefused(
                "embedding handle with a wrong seal: forged, damaged, or issued before this server started"
            )
        handle = _parse(body)
        if boot_of_segment(handle.segment) != boot.id:
            raise HandleRefused(f"embedding handle of another boot: {handle.segment!r}, this is {boot.id}")
        if handle.fingerprint != fingerprint:
            raise HandleRefused(
                f"embedding handle of another model, preprocessing or layout: {handle.fingerprint.hex()}, "
                f"this is {fingerprint.hex()}"
            )
        return handle


def content_digest(content: bytes, boot: BootKey) -> bytes:
    """The 16 bytes that name some content (an image as it came) within one boot; the store's key.

    Keyed, so that a client cannot prepare two images with one digest.
    """
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=boot.key, person=b"relay content").digest()


def fingerprint_of(*parts: str) -> bytes:
    """The 16 bytes that stand for a model, its preprocessing and this layout; `parts` in a fixed order."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"relay model")
    for part in (str(LAYOUT_VERSION), *parts):
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
    return hasher.digest()


def _mac(body: bytes, boot: BootKey) -> bytes:
    return hashlib.blake2b(body, digest_size=_MAC_BYTES, key=boot.key, person=b"relay handle").digest()


def _parse(body: bytes) -> EmbeddingHandle:
    """The handle in an authentic body; refuses one that another version of this code sealed."""
    magic, version, dtype, *numbers, digest, fingerprint, segment = _BODY.unpack(body)
    slot, lease_index, rows, width, offset, generation, lease_id = numbers
    if magic != _MAGIC or version != HANDLE_VERSION or dtype >= len(_DTYPES):
        raise HandleRefused(f"embedding handle of version {version}, this process knows {HANDLE_VERSION}")
    return EmbeddingHandle(
        segment=segment.rstrip(b"\0").decode("ascii", errors="replace"),
        slot=slot,
        offset=offset,
        shape=(rows, width),
        dtype=_DTYPES[dtype],
        generation=generation,
        lease_index=lease_index,
        lease_id=lease_id,
        digest=digest,
        fingerprint=fingerprint,
    )
