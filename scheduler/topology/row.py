"""One line of a link matrix: the header that names the columns, or the row of one device."""

from __future__ import annotations

import re
from dataclasses import dataclass

from scheduler.topology.links import SELF, UNKNOWN, is_link

MAX_GPUS = 128
"""A larger number in a label is no GPU: nvidia-smi counts the GPUs of one machine, and a damaged text must not cost
time that grows with a number written in it."""

MAX_DEVICES = 1024
"""A header with more columns is none; bounds the work on a hostile text."""

PEER_STATUSES = frozenset({"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"})
"""Cells of `topo -p2p`: they say what is permitted, not how far it is."""

CPU, NUMA, GPU_NUMA = "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"

_LABEL = re.compile(r"(?<![A-Za-z0-9_])GPU ?([0-9]{1,3})(?![A-Za-z0-9_])", re.ASCII | re.IGNORECASE)
_HEADER_LABEL = re.compile(r"GPU ?([0-9]{1,3})(?![0-9])", re.ASCII | re.IGNORECASE)
_COLUMNS = {
    CPU: re.compile(r"CPU\s{0,16}Affinity", re.IGNORECASE),
    NUMA: re.compile(r"NUMA\s{0,16}Affinity", re.IGNORECASE),
    GPU_NUMA: re.compile(r"GPU\s{0,16}NUMA\s{0,16}ID", re.IGNORECASE),
}
_DEVICE_NAME = re.compile(r"NIC[0-9]+|mlx[0-9]+_[0-9]+|[^\s|]+", re.ASCII | re.IGNORECASE)
_WORD = re.compile(r"[^\s|]+")
_NIC_ROW = re.compile(r"^[^A-Za-z0-9]*([A-Za-z][A-Za-z0-9_.:\-]*[0-9])[\s|]+(.*)$", re.ASCII)

_FUSED_CELLS = re.compile(r"(?:X|NV[0-9]{1,2}|PIX|PXB|PHB|NODE|SYS|SOC)+", re.ASCII)
_ONE_CELL = re.compile(r"X|NV[0-9]{1,2}|PIX|PXB|PHB|NODE|SYS|SOC", re.ASCII)
_CELL_AND_LIST = re.compile(r"([A-Z]{1,4}?)([0-9][0-9,\-]*[,\-][0-9,\-]*)", re.ASCII)
_LIST = re.compile(r"[0-9,\-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Header:
    """The line that names the columns."""

    gpus: tuple[int, ...]
    nics: tuple[str, ...]
    columns: tuple[str, ...]  # of CPU, NUMA, GPU_NUMA, those that are named, in this order

    @property
    def num_devices(self) -> int:
        """Columns of link cells."""
        return len(self.gpus) + len(self.nics)


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of one GPU: classes, "X", peer statuses, or "unknown" for a cell that cannot be read."""

    gpu: int
    cells: tuple[str, ...]
    tail: tuple[str, ...] = ()
    """What follows the links: fields with their empty ones where tabs or bars divide them, else words."""
    is_divided: bool = False  # by tabs or bars
    starts: tuple[int, ...] = ()  # of all words after the label, with tabs expanded; only where blanks divide
    has_damaged_list: bool = False
    """Blanks were lost before the tail: its first field was glued to a link cell and may lack digits."""
    text: str = ""

    @property
    def self_positions(self) -> list[int]:
        """Where the row says "X"; one position in an undamaged row."""
        return [position for position, cell in enumerate(self.cells) if cell == SELF]


def read_header(line: str) -> Header | None:
    """The header in `line`, whatever stands before it; None if it is not one."""
    labels = list(_HEADER_LABEL.finditer(line))
    if not labels:
        return None
    run = [labels[0]]
    for label in labels[1:]:
        if line[run[-1].end() : label.start()].strip(" \t|"):
            break
        run.append(label)
    found = {name: match for name, pattern in _COLUMNS.items() if (match := pattern.search(line, run[-1].end()))}
    end_of_devices = min((match.start() for match in found.values()), default=len(line))
    between = line[run[-1].end() : end_of_devices]
    named = between.split("|") if "|" in between else _DEVICE_NAME.findall(between)
    others = tuple(name.strip() for name in named if any(letter.isalnum() for letter in name))
    gpus = tuple(int(label.group(1)) for label in run)
    is_alone = len(run) == 1
    if (
        max(gpus) >= MAX_GPUS
        or len(set(gpus)) != len(gpus)
        or len(others) > MAX_DEVICES
        or (is_alone and not found and gpus != (0,))
    ):
        return None
    if (is_alone or not found) and not all(re.search(r"[0-9]", name) for name in others):
        return None  # prose: "GPU0 GPU1 are bridged"
    columns = tuple(name for name in (CPU, NUMA, GPU_NUMA) if name in found)
    return Header(gpus=gpus, nics=others, columns=columns)


def read_row(line: str, num_devices: int | None) -> Row | None:
    """The row of a GPU in `line`, whatever stands before its label; None if it is not one.

    `num_devices` is the header's count, if a header was seen: up to it, a word that is no class counts as one
    unreadable cell, so that the cells after it keep their columns.
    """
    for label in _LABEL.finditer(line):
        gpu = int(label.group(1))
        first = _WORD.search(line, label.end())
        if gpu >= MAX_GPUS or first is None or not _starts_row(first.group()):
            continue
        rest = line[label.end() :]
        if rest.lstrip().startswith("|"):
            return _read_divided(gpu, _drop_outer(rest.split("|")), num_devices, line)
        if "\t" in rest:
            fields = rest.split("\t")
            return _read_divided(gpu, fields[0 if fields[0].strip() else 1 :], num_devices, line)
        return _read_words(gpu, line, label.end(), num_devices)
    return None


def read_nic_row(line: str) -> str | None:
    """The name of the network adapter whose row `line` is; None if it is no such row."""
    match = _NIC_ROW.match(line)
    if match is None or _LABEL.match(match.group(1)):
        return None
    words = _WORD.findall(match.group(2))
    is_row = bool(words) and all(_split(word)[0] and not _split(word)[1] for word in words)
    return match.group(1) if is_row else None


def read_continuation(line: str) -> tuple[str, ...] | None:
    """The words of a line that can only be the rest of a wrapped row; None otherwise."""
    words = tuple(_WORD.findall(line))
    if not words or not _split(words[0])[0]:
        return None
    return words if all(_split(word)[0] or _LIST.fullmatch(word) or word == "N/A" for word in words) else None


def continue_row(row: Row, words: tuple[str, ...], num_devices: int) -> Row:
    """`row` with the words of its next line."""
    joined = _read_divided(row.gpu, [*row.cells, *words], num_devices, row.text)
    return Row(
        row.gpu,
        joined.cells,
        joined.tail,
        True,
        (),
        row.has_damaged_list or joined.has_damaged_list,
        row.text,
    )


def _starts_row(word: str) -> bool:
    return word.upper() in PEER_STATUSES or bool(_split(word)[0])


def _split(word: str) -> tuple[tuple[str, ...], str]:
    """The link cells that `word` is made of, and a CPU list glued behind them; ((), "") if it is neither.

    `SYSSYS` is two cells. `PH0-115` is a cell that cannot be read, and a list.
    """
    upper = word.upper()
    if _FUSED_CELLS.fullmatch(upper):
        cells = _ONE_CELL.findall(upper)
        return tuple(cell if cell == SELF or is_link(cell) else UNKNOWN for cell in cells), ""
    if match := _CELL_AND_LIST.fullmatch(upper):
        cell = match.group(1)
        return (cell if cell == SELF or is_link(cell) else UNKNOWN,), match.group(2)
    return (), ""


def _read_divided(gpu: int, fields: list[str], num_devices: int | None, text: str) -> Row:
    """The row whose fields are divided by tabs or bars.

    Empty fields between links are doubled tabs; those after the last link are affinities that were shown empty.
    """
    cells: list[str] = []
    after_links = 0
    for index, field in enumerate(fields):
        words = field.split()
        for position, word in enumerate(words):
            more, glued = _take(word, len(cells), num_devices)
            cells += more
            if glued or not more:
                rest = ([glued] if glued else []) + words[position + len(more[:1]) :]
                empty = [""] * (index - after_links) if position == 0 and not glued else []
                tail = (*empty, " ".join(rest), *(later.strip() for later in fields[index + 1 :]))
                return Row(gpu, tuple(cells), tail, True, (), bool(glued), text)
        if words:
            after_links = index + 1
    return Row(gpu, tuple(cells), ("",) * (len(fields) - after_links), True, (), False, text)


def _read_words(gpu: int, line: str, start: int, num_devices: int | None) -> Row:
    """The row whose cells are divided by blanks."""
    cells: list[str] = []
    tail: list[str] = []
    is_damaged = False
    words = list(_WORD.finditer(line, start))
    for match in words:
        word = match.group()
        more, glued = _take(word, len(cells), num_devices) if not tail else ((), "")
        cells += more
        if glued:
            is_damaged = True
        if glued or not more:
            tail.append(glued or word)
    starts = _columns_of(line, [match.start() for match in words])
    return Row(gpu, tuple(cells), tuple(tail), False, starts, is_damaged, line)


def _take(word: str, num_cells: int, num_devices: int | None) -> tuple[tuple[str, ...], str]:
    """The cells in `word`, given how many came before it; no cells where the tail begins."""
    upper = word.upper()
    if upper in PEER_STATUSES:
        return (upper,), ""
    cells, glued = _split(word)
    if cells:
        return cells, glued
    is_unreadable = num_devices is not None and num_cells < num_devices and not _LIST.fullmatch(upper)
    return ((UNKNOWN,) if is_unreadable else ()), ""


def _drop_outer(fields: list[str]) -> list[str]:
    """The fields between the bars of a table row."""
    inner = fields[1:]
    return inner[:-1] if inner and not inner[-1].strip() else inner


def _columns_of(line: str, positions: list[int]) -> tuple[int, ...]:
    """Where on a terminal the characters at `positions` stand: tabs reach to the next multiple of 8."""
    columns: dict[int, int] = {}
    column = last = 0
    for position in sorted(positions):
        past = column % 8
        column += len((" " * past + line[last:position]).expandtabs(8)) - past
        columns[position] = column
        last = position
    return tuple(columns[position] for position in positions)
