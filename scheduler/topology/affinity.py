"""The affinity cells behind the links of a row: near CPUs, near NUMA nodes, the GPU's own NUMA node.

These are the cells that pastes damage most: empty ones vanish, neighbours fuse, ends are clipped. A cell is given as
it is shown; what its place or its text leaves in doubt is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from scheduler.topology.cpu_list import read_list, read_ranges
from scheduler.topology.links import SELF
from scheduler.topology.row import CPU, GPU_NUMA, NUMA, Header, Row

_LIST_LIKE = re.compile(r"[0-9,\-]+|N/?A|", re.ASCII)
_TAB = 8
_NUMA_NOTE = re.compile(r"\bNUMA\s{0,8}(?:node)?\s{0,8}[:#=]?\s{0,8}([0-9]{1,3})\b", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Affinity:
    """The three cells of one GPU, as shown."""

    cpu: str | None = None
    numa: str | None = None
    gpu_numa: str | None = None
    is_damaged: bool = False  # `cpu` was glued to the last link and may lack digits at its front
    is_fused: bool = False  # `cpu` may end with the digits of `numa`
    ends_text: bool = False  # the last cell may lack digits at its end


def read_affinity(row: Row, header: Header | None, ends_text: bool) -> Affinity:
    """What the tail of `row` says. `ends_text`: the row is the last line of the text, which may be cut there."""
    columns = header.columns if header else _infer_columns(row)
    words = " ".join(row.tail).split()
    if not columns:
        note = _NUMA_NOTE.search(" ".join(words))
        return Affinity(numa=note.group(1) if note else None)
    if columns[0] != CPU:
        return Affinity()  # the header lost its first words: nobody knows which
    if len(words) == len(columns):
        values: list[str | None] = list(words)
    elif row.is_divided:
        values = _by_field(row.tail, len(columns))
    elif len(words) > len(columns):
        values = list(words[: len(columns)])
    else:
        values = _by_place(row, len(columns))
    if not values:
        return _fused(words, columns)
    while ends_text and values and values[-1] == "":
        values = values[:-1]
    cells = dict(zip(columns, values, strict=False))
    if not all(_LIST_LIKE.fullmatch(value or "") for value in cells.values()):
        return Affinity()
    has_lost_tab = len(columns) == len(row.tail) == 3 and "\t" in row.text and cells.get(NUMA) == ""
    return Affinity(
        cells.get(CPU),
        cells.get(NUMA),
        cells.get(GPU_NUMA),
        is_damaged=row.has_damaged_list,
        is_fused=has_lost_tab and bool(cells.get(CPU)),
        ends_text=ends_text,
    )


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
        settled[gpu] = _without_stump(affinity, affinities)
        if affinity.is_damaged and not _is_confirmed(affinity, whole):
            settled[gpu] = replace(affinity, cpu=None, is_damaged=False)
            warnings.append(f"GPU{gpu}: the CPU list is fused with a link and cannot be told apart")
        elif affinity.is_fused:
            settled[gpu] = _unfuse(affinity, whole)
            warnings.append(
                f"GPU{gpu}: the CPU list {affinity.cpu!r} is fused with the NUMA node: {_say(settled[gpu])}"
            )
    return settled, warnings


def _without_stump(affinity: Affinity, others: Mapping[int, Affinity]) -> Affinity:
    """The affinity without a last cell that was cut: one that ends in `-` or `,`, or, in the last line of the text,
    one with which another row's cell goes on."""
    cells = (affinity.cpu, affinity.numa, affinity.gpu_numa)
    last = max((place for place, cell in enumerate(cells) if cell is not None), default=0)
    cell = cells[last] or ""
    same_column = {(other.cpu, other.numa, other.gpu_numa)[last] or "" for other in others.values()} - {cell}
    is_stump = affinity.ends_text and any(other.startswith(cell) for other in same_column)
    if not is_stump and not cell.endswith(("-", ",")):
        return affinity
    kept = [None if place == last else cell for place, cell in enumerate(cells)]
    return replace(affinity, cpu=kept[0], numa=kept[1], gpu_numa=kept[2])


def _say(affinity: Affinity) -> str:
    return "given up" if affinity.cpu is None else f"read as {affinity.cpu!r} and {affinity.numa!r}"


def _infer_columns(row: Row) -> tuple[str, ...]:
    """The columns of a row without a header, where its shape leaves one reading only."""
    words = " ".join(row.tail).split()
    num_fields = len(row.tail)
    if num_fields == 3 or (row.is_divided and num_fields == 4 and not row.tail[2]):
        return (CPU, NUMA, GPU_NUMA)
    is_list = bool(words) and bool(re.search(r"[0-9][-,]", words[0]))
    return (CPU, NUMA)[:num_fields] if is_list and num_fields == len(words) <= 2 and words[-1] != "N/A" else ()


def _by_field(fields: tuple[str, ...], num_columns: int) -> list[str | None]:
    """The cells between tabs or bars, empty ones included; nvidia-smi puts two tabs before GPU NUMA ID.

    None of them if the fields are too few: what the last one holds is not certain then.
    """
    if num_columns == 3 and len(fields) == 4 and not fields[2]:
        fields = (*fields[:2], fields[3])
    while len(fields) > num_columns and not fields[-1]:
        fields = fields[:-1]
    return list(fields) if len(fields) == num_columns else []


def _by_place(row: Row, num_columns: int) -> list[str | None]:
    """The cells by where their words begin, where blanks stand for tabs: an empty cell still takes its tab.

    None of them unless exactly one way of leaving cells empty puts the words where they are.
    """
    num_cells, num_words = len(row.cells), len(row.tail)
    if not row.tail or len(row.starts) != num_cells + num_words or num_cells < 1:
        return []
    first = row.starts[num_cells - 1] - (row.cells[-1] == SELF) + _TAB  # " X " begins one to the right
    ways: list[list[str | None]] = []
    for places in combinations(range(num_columns), num_words):
        values = [""] * num_columns
        for place, word in zip(places, row.tail, strict=True):
            values[place] = word
        is_possible = values[0] == "" or "" not in values[1:2]  # nvidia-smi never leaves NUMA alone empty
        if is_possible and _starts(values, first) == row.starts[num_cells:]:
            ways.append(list(values))
    return ways[0] if len(ways) == 1 else []


def _starts(values: list[str], first: int) -> tuple[int, ...]:
    """Where the words of a tail begin if tabs divide its cells."""
    starts: list[int] = []
    column = first
    for place, value in enumerate(values):
        if place == 2:
            column += _TAB  # two tabs before GPU NUMA ID
        if value:
            starts.append(column)
        column += _TAB * (len(value) // _TAB + 1)
    return tuple(starts)


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
    return (
        ranges[0][0] == 0 and nodes is not None and 0 in nodes and all(_are_apart(ranges, other) for other, _ in whole)
    )


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
