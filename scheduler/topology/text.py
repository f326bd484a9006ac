"""Recorded terminal text, freed of what terminals, editors and web pages add to it."""

from __future__ import annotations

import re
from itertools import pairwise

_ESCAPES = re.compile(
    r"(?:\x1b|\x9b|\\x1b|\\033|\\u001b|\\e|\^\[|␛)\[?[0-9;?]{0,16}[A-Za-z]"  # also escapes written out as text
    r"|\[[0-9]{1,3}(?:;[0-9]{1,3}){0,4}m",  # the escape byte was lost on the way, its parameters were not
    re.ASCII,
)
_BLANKS = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]|&nbsp;")
_INVISIBLE = re.compile("[\u0000\u00ad\u200b-\u200f\u2060\ufeff]")
_BARS = re.compile("[\u2502\u2503\u2551\uff5c]")
_WRITTEN_OUT = re.compile(r"\\[tn][\s\\tn]{0,16}GPU ?[0-9]", re.ASCII)

_CELL = r"(?:X|NV[0-9]{1,2}|PIX|PXB|PHB|NODE|SYS|SOC)"
_DEVICE = r"(?:GPU ?[0-9]{1,3}|NIC[0-9]{1,3}|mlx[0-9]{1,2}_[0-9]{1,3})"
_ROW_START = re.compile(
    rf"(?<![A-Za-z0-9_]){_DEVICE}[ \t|]+(?={_CELL}(?![A-Za-z0-9_]))"
    r"|(?<![A-Za-z0-9_])(?:NIC )?Legend:",
    re.ASCII | re.IGNORECASE,
)
_GPU_LABEL = re.compile(r"GPU ?[0-9]", re.ASCII | re.IGNORECASE)


def decode(data: bytes) -> str:
    """The text of a file, whatever wrote it: UTF-8, or UTF-16 as PowerShell redirects do. Never raises."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8", errors="replace")


def read_lines(text: str) -> list[str]:
    """The lines without escape sequences, exotic blanks and line ends; tabs and inner blanks stay as they are.

    A text whose line ends were lost is broken again before each row label, so that one line is at most one row.
    """
    if _WRITTEN_OUT.search(text):
        text = text.replace("\\r", "").replace("\\n", "\n").replace("\\t", "\t")
    text = _ESCAPES.sub("", text)
    text = _INVISIBLE.sub("", _BLANKS.sub(" ", _BARS.sub("|", text)))
    text = re.sub(r"\r\n?|<br ?/?>|[\x0b\x0c\x85\u2028\u2029]", "\n", text)
    return [part for line in text.split("\n") for part in _split_rows(line)]


def _split_rows(line: str) -> list[str]:
    """The rows in a line that holds several, or a header and rows; else the line itself."""
    starts = [match.start() for match in _ROW_START.finditer(line)]
    if not starts or (len(starts) == 1 and not _GPU_LABEL.search(line, 0, starts[0])):
        return [line]
    bounds = [0, *starts, len(line)]
    return [line[first:last] for first, last in pairwise(bounds) if first < last]
