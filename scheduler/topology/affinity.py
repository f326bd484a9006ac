"""The affinity cells behind the links of a row: near CPUs, near NUMA nodes, the GPU's own NUMA node.

These are the cells that pastes damage most: empty ones vanish, neighbours fuse, ends are clipped. A cell is given as
it is shown; what its place or its text leaves in doubt is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scheduler.topology.cpu_list import read_list, read_ranges
from scheduler.topology.row import CPU, GPU_NUMA, NUMA, Header, Row

_LIST_LIKE = re.compile(r"[0-9,\-]+|N/?A|", re.ASCII)
_NUMA_NOTE = re.compile(r"\bNUMA\s{0,8}(?:node)?\s{0,8}[:#=]?\s{0,8}([0-9]{1,3})\b", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Affinity:
    """The three cells of one GPU, as shown."""

    cpu: str | None = None
    numa: str | None = None
    gpu_numa: str | None = None
    is_damaged: bool = False  # `cpu` was glued to the last link and may lack digits at its front
    is_fused: bool = False  # `cpu` may end with the digits of `numa`


def read_affinity(row: Row, header: Header | None, ends_text: bool) -> Affinity:
    """What the tail of `row` says. `ends_text`: the row is the last line, so its last field may be cut."""
    columns = header.columns if header else _infer_columns(row)
    words = " ".join(row.tail).split()
    if not columns:
        note = _NUMA_NOTE.search(" ".join(words))
        return Affinity(numa=note.group(1) if note else None)
    if len(words) == len(columns):
        values: list[str | None] = list(words)
    elif row.is_divided:
        values = _by_field(row.tail, len(columns), ends_text)
    elif len(words) > len(columns):
        values = list(words[: len(columns)])
    else:
        values = _by_place(row, header)
        if not any(value is not None for value in values):
            return _fused(words, columns)
    cells = dict(zip(columns, values, strict=False))
    if not all(_LIST_LIKE.fullmatch(value or "") for value in cells.values()):
        return Affinity()
    affinity = Affinity(cells.get(CPU), cells.get(NUMA), cells.get(GPU_NUMA), is_damaged=row.has_damaged_list)
    return replace(affinity, is_fused=bool(affinity.cpu) and affinity.numa == "")


def settle(affinities: Mapping[int, Affinity]) -> tuple[dict[int, Affinity], list[str]]:
    """The affinities with damaged cells confirmed by undamaged ones or given up, and a warning for each."""
    whole = [
        (ranges, affinity.numa or "")
        for affinity in affinities.values()
        if not affinity.is_damaged and not affinity.is_fused and (ranges := read_ranges(affinity.cpu or ""))
    ]
    settled: dict[int, Affinity] = {}
    warnings: list[str] = []
    for gpu, affinity in affinities.items():
        settled[gpu] = affinity
        if affinity.is_damaged and not _is_confirmed(affinity, whole):
            settled[gpu] = replace(affinity, cpu=None, is_damaged=False)
            warnings.append(f"GPU{gpu}: the CPU list is fused with a link and cannot be told apart")
        elif affinity.is_fused:
            settled[gpu] = _unfuse(affinity, whole)
            warnings.append(f"GPU{gpu}: the CPU list {affinity.cpu!r} is fused with the NUMA node: {_say(settled[gpu])}")
    return settled, warnings


def _say(affinity: Affinity) -> str:
    return "given up" if affinity.cpu is None else f"read as {affinity.cpu!r} and {affinity.numa!r}"


def _infer_columns(row: Row) -> tuple[str, ...]:
    """The columns of a row without a header, where its shape leaves one reading only."""
    words = " ".join(row.tail).split()
    if len(words) == 3 or (len(row.tail) == 4 and not row.tail[2]):
        return (CPU, NUMA, GPU_NUMA)
    is_list = bool(words) and bool(re.search(r"[0-9][-,]", words[0]))
    return (CPU, NUMA)[: len(words)] if is_list and len(words) <= 2 else ()


def _by_field(fields: tuple[str, ...], num_columns: int, ends_text: bool) -> list[str | None]:
    """The cells between tabs or bars, empty ones included; nvidia-smi puts two tabs before GPU NUMA ID."""
    if num_columns == 3 and len(fields) == 4 and not fields[2]:
        fields = (*fields[:2], fields[3])
    while len(fields) > num_columns and not fields[-1]:
        fields = fields[:-1]
    if len(fields) > num_columns:
        return [None] * num_columns
    values: list[str | None] = list(fields)
    if values and len(values) < num_columns and ends_text:
        values[-1] = None
    return values + [None] * (num_columns - len(values))


def _by_place(row: Row, header: Header | None) -> list[str | None]:
    """The cells by the columns they begin in, if every link of the row begins where the header says.

    Then a column in which nothing begins was shown empty.
    """
    if header is None or not row.tail or len(row.starts) != len(row.cells) + len(row.tail):
        return []
    num_devices = header.num_devices
    if len(row.cells) != num_devices or len(header.starts) != num_devices + len(header.columns):
        return []
    shifts = {start - place for start, place in zip(row.starts, header.starts[:num_devices], strict=False)}
    if not shifts <= {0, 1}:  # " X " begins one to the right
        return []
    places = dict(zip(header.starts[num_devices:], range(len(header.columns)), strict=True))
    values: list[str | None] = [""] * len(header.columns)
    for start, word in zip(row.starts[num_devices:], row.tail, strict=True):
        if start not in places:
            return []
        values[places[start]] = word
    return values


def _fused(words: list[str], columns: tuple[str, ...]) -> Affinity:
    """The cells of a row that lacks one word, if that can be a NUMA node glued to the CPU list."""
    if columns[:2] != (CPU, NUMA) or len(words) != len(columns) - 1 or read_ranges(words[0]) is None:
        return Affinity()
    gpu_numa = words[1] if len(columns) == 3 else None
    return Affinity(cpu=words[0], gpu_numa=gpu_numa, is_fused=True)


def _is_confirmed(affinity: Affinity, whole: list[tuple[list[tuple[int, int]], str]]) -> bool:
    """Whether a list that may lack digits at its front is still to be believed.

    It is if an undamaged row has the same, or if it begins with CPU 0 on a GPU near NUMA node 0 and crosses no other
    list: a clipped list would begin elsewhere.
    """
    ranges = read_ranges(affinity.cpu or "")
    if ranges is None:
        return False
    if any(ranges == other for other, _ in whole):
        return True
    nodes = read_list(affinity.numa or "")
    return ranges[0][0] == 0 and nodes is not None and 0 in nodes and all(_are_apart(ranges, other) for other, _ in whole)


def _unfuse(affinity: Affinity, whole: list[tuple[list[tuple[int, int]], str]]) -> Affinity:
    """`cpu` and `numa` taken apart where the undamaged rows allow exactly one way; else both None."""
    text = affinity.cpu or ""
    ways: list[tuple[str, str | None]] = []
    for digits in range(1, 4):
        cpu, numa = text[:-digits], text[-digits:]
        ranges = read_ranges(cpu)
        if ranges is None or not numa.isdigit() or numa != str(int(numa)):
            continue
        is_same = any(ranges == other and numa == node for other, node in whole)
        is_sibling = bool(whole) and all(
            _are_apart(ranges, other) and numa != node and _widths(ranges) == _widths(other) for other, node in whole
        )
        if is_same or is_sibling:
            ways.append((cpu, numa))
    if any(read_ranges(text) == other for other, _ in whole):
        ways.append((text, None))
    if len(ways) != 1:
        return replace(affinity, cpu=None, numa=None, is_fused=False)
    return replace(affinity, cpu=ways[0][0], numa=ways[0][1], is_fused=False)


def _are_apart(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> bool:
    return all(a_last < b_first or b_last < a_first for a_first, a_last in first for b_first, b_last in second)


def _widths(ranges: list[tuple[int, int]]) -> list[int]:
    return [last - first + 1 for first, last in ranges]
