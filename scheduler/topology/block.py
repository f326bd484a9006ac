"""A text taken apart into matrices: each with its header, its rows and what its legend says."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from scheduler.topology.cpu_list import read_ranges
from scheduler.topology.links import SELF, is_link
from scheduler.topology.row import (
    PEER_STATUSES,
    Header,
    Row,
    continue_row,
    read_continuation,
    read_header,
    read_nic_row,
    read_row,
)

_LEGEND = re.compile(r"[^A-Za-z0-9]{0,16}(?:NIC )?Legend\b", re.IGNORECASE)
_KEY = re.compile(r"(?<![A-Za-z0-9])(X|SYS|SOC|NODE|PHB|PXB|PIX|NV#|OK|CNS|GNS|TNS|NS) {0,8}= ?[A-Za-z]")
_NIC_NAME = re.compile(r"(?<![A-Za-z0-9])(NIC[0-9]{1,3}) ?: ?([^\s|:]+)", re.ASCII)
_HIDES_NVLINK = re.compile(r"topo\s+(?:-mp|-pm)\b")
_MAX_HEADER_LINES = 16  # over which a terminal may wrap a header: 1024 columns; bounds the work on a hostile text


@dataclass(slots=True)
class Block:
    """One matrix as it stands in the text."""

    header: Header | None = None
    rows: list[Row] = field(default_factory=list)
    nic_rows: list[str] = field(default_factory=list)
    nic_names: dict[str, str] = field(default_factory=dict)  # NIC0 -> mlx5_0
    legend: set[str] = field(default_factory=set)
    before: str = ""
    """The last line before it: often the command."""
    ends_text: bool = False
    """Whether its last row is the last line of the text, so that it may be cut anywhere."""
    has_repeated_row: bool = False

    @property
    def is_link_matrix(self) -> bool:
        """Whether it shows links: of several GPUs, or of one that has none to show."""
        cells = {cell for row in self.rows for cell in row.cells}
        if any(is_link(cell) for cell in cells):
            return True
        gpus = {row.gpu for row in self.rows} | set(self.header.gpus if self.header else ())
        is_shown = self.header is not None or any(read_ranges(" ".join(row.tail[:1])) for row in self.rows)
        return gpus == {0} and SELF in cells and is_shown and not self.is_peer_matrix

    @property
    def is_peer_matrix(self) -> bool:
        """Whether it shows what `topo -p2p` asks: permissions in place of links."""
        cells = {cell for row in self.rows for cell in row.cells}
        is_asked = "-p2p" in self.before or "OK" in self.legend
        return not any(is_link(cell) for cell in cells) and (bool(cells & PEER_STATUSES) or is_asked)

    @property
    def hides_nvlink(self) -> bool:
        """Whether this is `topo -mp`: asked for so, or a legend that is whole but for NVLink."""
        is_whole = {"X", "PHB", "PXB", "PIX"} <= self.legend and bool({"SYS", "SOC"} & self.legend)
        return bool(_HIDES_NVLINK.search(self.before)) or (is_whole and "NV#" not in self.legend)

    def row_of(self, gpu: int) -> Row | None:
        """The row of `gpu`, if there is one."""
        return next((row for row in self.rows if row.gpu == gpu), None)


def read_blocks(lines: list[str]) -> list[Block]:
    """All matrices in the text, in its order. Two hosts in one paste are two blocks, never one."""
    reader = _Reader()
    for line in lines:
        reader.read(line)
    return [block for block in reader.blocks if block.rows]


class _Reader:
    """Where the reading stands: the blocks so far, and whether the last one can still grow."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False
        self._header_line = ""
        self._num_header_lines = 0
        self._repeated_header: Header | None = None
        self._last_line = ""
        self._can_continue = False
        """The line before was a row, or the continuation of one."""

    def read(self, line: str) -> None:
        """Take the next line."""
        if not line.strip():
            return
        if self.blocks:
            self.blocks[-1].ends_text = False
        if _LEGEND.match(line):
            self._is_open = False
        num_devices = self._header.num_devices if self._header else None
        if (row := read_row(line, num_devices)) is not None:
            self._take_row(row)
            self._can_continue = True
        elif (header := read_header(line)) is not None:
            self._can_continue = False
            self._take_header(header, line)
        elif not self._continue_row(line):
            self._can_continue = False
            self._take_other(line)
        self._last_line = line

    @property
    def _header(self) -> Header | None:
        return self.blocks[-1].header if self._is_open else None

    def _take_row(self, row: Row) -> None:
        known = self.blocks[-1].row_of(row.gpu) if self._is_open else None
        if known is not None and known is self.blocks[-1].rows[-1] and known.cells == row.cells:
            self.blocks[-1].has_repeated_row = True
            return
        if known is not None and not known.self_positions:
            self.blocks[-1].rows.remove(known)
        elif known is not None or not self._is_open:
            self._open(self._repeated_header if known is not None else None)
        self._repeated_header = None
        self.blocks[-1].rows.append(row)
        self.blocks[-1].ends_text = True

    def _take_header(self, header: Header, line: str) -> None:
        if self._is_open and not self.blocks[-1].rows and self._extend_header(line):
            return
        known = self._header
        if known is not None and self.blocks[-1].rows and (known.gpus, known.nics) == (header.gpus, header.nics):
            self._repeated_header = header
            return
        self._open(header)
        self._header_line = line

    def _take_other(self, line: str) -> None:
        if not self.blocks:
            return
        block = self.blocks[-1]
        block.legend |= set(_KEY.findall(line))
        block.nic_names |= {nic: name for nic, name in _NIC_NAME.findall(line) if nic not in block.nic_names}
        if not self._is_open:
            return
        if not block.rows:
            self._extend_header(line)
        elif (nic := read_nic_row(line)) is not None:
            block.nic_rows.append(nic)

    def _continue_row(self, line: str) -> bool:
        """Join a line that a terminal wrapped to the row before it; whether it was one."""
        header = self._header
        if not self._can_continue or header is None:
            return False
        row = self.blocks[-1].rows[-1]
        words = read_continuation(line)
        if words is None or len(row.cells) >= header.num_devices or any(row.tail):
            return False
        self.blocks[-1].rows[-1] = continue_row(row, words, header.num_devices)
        self.blocks[-1].ends_text = True
        return True

    def _extend_header(self, line: str) -> bool:
        """Join a line that a terminal wrapped to the header before it; whether it was one."""
        self._num_header_lines += 1
        known = self.blocks[-1].header if self._num_header_lines <= _MAX_HEADER_LINES else None
        header = read_header(f"{self._header_line} {line.strip()}") if known is not None else None
        if header is None or known is None:
            return False
        if (header.num_devices, len(header.columns)) <= (known.num_devices, len(known.columns)):
            return False
        self.blocks[-1].header = header
        self._header_line = f"{self._header_line} {line.strip()}"
        return True

    def _open(self, header: Header | None) -> None:
        self.blocks.append(Block(header=header, before=self._last_line))
        self._is_open = True
        self._num_header_lines = 1
        self._repeated_header = None
