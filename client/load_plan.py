"""When the requests of a load test are sent, and with which pictures. Pure: chance is an argument."""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from client.errors import InvalidRequest

USUAL_SIZE = (336, 336)
_AZURE = {"TIMESTAMP": "time_s", "NumImages": "images", "GeneratedTokens": "output_tokens"}


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request is sent, in seconds from the start; what is None is as for all others."""

    at_s: float
    num_images: int | None = None
    max_tokens: int | None = None


def poisson(rate_per_s: float, num_requests: int, chance: random.Random) -> Iterator[Arrival]:
    """Arrivals independent of each other, `rate_per_s` on average."""
    at_s = 0.0
    for _ in range(num_requests):
        at_s += chance.expovariate(rate_per_s)
        yield Arrival(at_s)


def trace(path: Path) -> list[Arrival]:
    """The arrivals in a file, in order: JSON Lines, or the CSV that the simulator reads; see `Arrival`.

        {"at_s": 0.5, "images": 1, "max_tokens": 20}          images and max_tokens may be left out

        time_s,images,prompt_tokens,output_tokens             times are counted from the first; other columns
        12.5,1,600,20                                         (prompt_tokens too) are not used

    Raises:
        InvalidRequest: no such file, a line that has no such time, or one before its predecessor.
    """
    try:
        text = path.read_text("utf-8-sig")  # spreadsheets write a mark first
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidRequest(f"trace {path}: {reason}") from error
    read = _from_json_lines if text.lstrip().startswith("{") else _from_csv
    arrivals: list[Arrival] = []
    try:
        for number, arrival in read(text, path):
            if not math.isfinite(arrival.at_s):
                raise InvalidRequest(f"trace {path}:{number}: {arrival.at_s} is no time")
            if arrival.at_s < (arrivals[-1].at_s if arrivals else 0.0):
                raise InvalidRequest(f"trace {path}:{number}: {arrival.at_s} is before the time above it")
            arrivals.append(arrival)
    except csv.Error as error:
        raise InvalidRequest(f"trace {path}: no CSV: {error}") from None
    if not arrivals:
        raise InvalidRequest(f"trace {path}: no request in it")
    return arrivals


def _from_json_lines(text: str, path: Path) -> Iterator[tuple[int, Arrival]]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            told = json.loads(line)
            yield number, _arrival(float(told["at_s"]), told.get("images"), told.get("max_tokens"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(f'trace {path}:{number}: must be {{"at_s": seconds}}: {error!r}') from None


def _from_csv(text: str, path: Path) -> Iterator[tuple[int, Arrival]]:
    rows = csv.DictReader(io.StringIO(text))
    names = [_AZURE.get(name.strip(), name.strip()) for name in rows.fieldnames or ()]
    if "time_s" not in names:
        raise InvalidRequest(f"trace {path}: neither JSON Lines with at_s nor a CSV with a column time_s")
    rows.fieldnames = names
    began_s: float | None = None
    for number, row in enumerate(rows, start=2):
        try:
            at_s = _seconds(row["time_s"])
            began_s = at_s if began_s is None else began_s
            yield number, _arrival(at_s - began_s, row.get("images"), row.get("output_tokens"))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"trace {path}:{number}: {error}") from None


def _arrival(at_s: float, num_images: object, max_tokens: object) -> Arrival:
    images = None if num_images in (None, "") else int(str(num_images))
    tokens = None if max_tokens in (None, "") else int(str(max_tokens))
    if (images is not None and images < 0) or (tokens is not None and tokens < 1):
        raise ValueError(f"images must be at least 0 and tokens at least 1, not {num_images} and {max_tokens}")
    return Arrival(at_s, images, tokens)


def _seconds(cell: str) -> float:
    """Seconds, or a date and time."""
    try:
        return float(cell)
    except ValueError:
        told = datetime.datetime.fromisoformat(cell.strip())
        return (told if told.tzinfo else told.replace(tzinfo=datetime.UTC)).timestamp()


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
