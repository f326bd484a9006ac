"""When the requests of a load test are sent, and with which pictures. Pure: chance is an argument."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from client.errors import InvalidRequest


def poisson(rate_per_s: float, num_requests: int, chance: random.Random) -> Iterator[float]:
    """Arrival times in seconds from the start: independent of each other, `rate_per_s` on average."""
    at_s = 0.0
    for _ in range(num_requests):
        at_s += chance.expovariate(rate_per_s)
        yield at_s


def trace(path: Path) -> list[float]:
    """The arrival times in a JSON Lines file, `{"at_s": 0.5}` each, in order.

    Raises:
        InvalidRequest: no such file, or a line that has no such time, or one before its predecessor.
    """
    times: list[float] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"trace {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            at_s = float(json.loads(line)["at_s"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f'trace {path}:{number}: must be {{"at_s": seconds}}: {error!r}') from None
        if not at_s >= (times[-1] if times else 0.0):
            raise InvalidRequest(f"trace {path}:{number}: {at_s} is before the time above it")
        times.append(at_s)
    return times


def size_from(text: str) -> tuple[int, int]:
    """Width and height out of `336x336`.

    Raises:
        InvalidRequest: anything else.
    """
    width, by, height = text.partition("x")
    if by and width.isdecimal() and height.isdecimal() and 0 < int(width) <= 16384 and 0 < int(height) <= 16384:
        return int(width), int(height)
    raise InvalidRequest(f"an image size must be WIDTHxHEIGHT, up to 16384 each, not {text!r}")


def picture(width: int, height: int, chance: random.Random) -> bytes:
    """A PNG of coloured bands with a noisy edge, different each time, so that no cache knows it.

    The file is about as large as a photograph's JPEG of that size: a quarter of a byte per pixel.
    """
    noisy = width // 12
    rows = []
    colour = chance.randbytes(3)
    for _ in range(height):
        if chance.random() < 0.02:
            colour = chance.randbytes(3)
        rows.append(b"\0" + colour * (width - noisy) + chance.randbytes(3 * noisy))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"tEXt", b"serial\0" + chance.randbytes(8).hex().encode()))
    body = ((b"IDAT", zlib.compress(b"".join(rows), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_part(kind, data) for kind, data in (*parts, *body))


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
