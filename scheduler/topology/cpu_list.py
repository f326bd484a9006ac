"""Lists of small numbers as the kernel writes them: `0-3,8,12-15`, for CPUs and for NUMA nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

MAX_NUMBER = 65535  # far above NR_CPUS of any distribution kernel (8192); bounds the work on a damaged text

_ITEM = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)


def read_ranges(text: str) -> list[tuple[int, int]] | None:
    """The inclusive ranges of a whole list, ascending; None if `text` is not one.

    Strict on purpose: a clipped list (`-31,64-95`, `96-191,288-`) must not read as a shorter true one.
    """
    ranges: list[tuple[int, int]] = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            return None
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        if last < first or last > MAX_NUMBER or (ranges and first <= ranges[-1][1]):
            return None
        ranges.append((first, last))
    return ranges


def read_list(text: str) -> frozenset[int] | None:
    """The numbers of a whole list; None if `text` is not one."""
    ranges = read_ranges(text)
    if ranges is None:
        return None
    return frozenset(number for first, last in ranges for number in range(first, last + 1))


def write_list(numbers: Iterable[int]) -> str:
    """The list as the kernel writes it; empty for no numbers."""
    items: list[str] = []
    run: list[int] = []
    for number in sorted(set(numbers)):
        if run and number == run[-1] + 1:
            run.append(number)
            continue
        items += _write_run(run)
        run = [number]
    return ",".join(items + _write_run(run))


def _write_run(run: list[int]) -> list[str]:
    if not run:
        return []
    return [str(run[0])] if len(run) == 1 else [f"{run[0]}-{run[-1]}"]


def may_be_truncated(text: str) -> bool:
    """Whether nvidia-smi may have cut this list short.

    On machines that number CPUs alternately over the sockets it prints the first six items and nothing that
    says so: `0,2,4,6,8,10` for `0,2,...,62`. Evenly spaced single CPUs are doubted as well, whatever their number.
    """
    ranges = read_ranges(text) or []
    if len(ranges) == 6:
        return True
    numbers = [first for first, last in ranges if first == last]
    steps = {later - earlier for earlier, later in pairwise(numbers)}
    return len(numbers) == len(ranges) >= 3 and len(steps) == 1
