"""The rows of one matrix set into columns, and the link that each pair of cells agrees on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.topology.block import Block
from scheduler.topology.links import UNKNOWN, farther, is_link, num_nvlinks
from scheduler.topology.row import PEER_STATUSES, Row
from scheduler.topology.topology import Pair, all_pairs


@dataclass(frozen=True, slots=True)
class _Claim:
    """What one cell says about a pair. A weak one ends a line that may be clipped there."""

    link: str
    is_weak: bool


class Grid:
    """The rows of a block set into columns. Owns the warnings that arise on the way."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.warnings: list[str] = []
        self.columns = self._name_columns()
        self.rows = [row for row in block.rows if self._is_row(row)]
        labels = [*self.columns, *(row.gpu for row in self.rows)]
        self.num_gpus = max(labels) + 1 if self.rows else 0
        self.num_columns = self._count_columns()
        self.damaged = self._find_damaged()
        self.certain_to = self._find_certain()
        if block.has_repeated_row:
            self.warnings.append("a row stands twice in the text")
        if block.header is None:
            self.warnings.append("the header is missing: there may be more GPUs than rows")
        if missing := sorted(set(range(self.num_gpus)) - {row.gpu for row in self.rows}):
            self.warnings.append(f"no usable row for GPU {', '.join(map(str, missing))}")

    def _name_columns(self) -> list[int]:
        """The GPU that each column shows, from the left: by the header where the rows' "X" agree with it."""
        header = self.block.header
        named = list(header.gpus) if header else []
        marks = [(row.gpu, row.self_positions[0]) for row in self.block.rows if len(row.self_positions) == 1]
        by_header = sum(place < len(named) and named[place] == gpu for gpu, place in marks)
        by_number = sum(place == gpu for gpu, place in marks)
        num_rows = max((gpu for gpu, _ in marks), default=-1) + 1
        if header is None:
            return list(range(num_rows))
        if by_header < by_number:
            self.warnings.append("the header does not fit the rows: columns are numbered by the rows")
            return list(range(num_rows))
        if _run_length(named) == len(named):
            may_be_clipped = named[0] == 0 and not header.nics
            return list(range(max(num_rows, len(named)))) if may_be_clipped else named
        is_selection = {row.gpu for row in self.block.rows} == set(named)
        return named if is_selection else named[: _run_length(named)]  # past a gap, a lost column may shift the names

    def _is_row(self, row: Row) -> bool:
        """Whether the row has its "X", or ends before it and has its place among the others."""
        if len(row.self_positions) == 1:
            return row.gpu in self.columns
        is_cut = self.block.header is not None and not row.self_positions and not any(row.tail)
        is_next = row.gpu in self.columns or self.block.row_of(row.gpu - 1) is not None
        return is_cut and is_next and len(row.cells) <= self._place_of(row)

    def _place_of(self, row: Row) -> int:
        return self.columns.index(row.gpu) if row.gpu in self.columns else row.gpu

    def _count_columns(self) -> int:
        """Columns of link cells in a whole row."""
        counts = Counter(len(row.cells) for row in self.rows if row.self_positions)
        if self.block.header:
            counts[self.block.header.num_devices] += 2  # the header weighs as much as two rows
        return max(counts, key=lambda count: (counts[count], count), default=0)

    def _find_damaged(self) -> set[int]:
        """Columns in which several rows cannot be read: what stands there otherwise is doubtful as well."""
        counts = Counter(place for row in self.rows for place, cell in enumerate(row.cells) if _is_unreadable(cell))
        return {place for place, count in counts.items() if count > 1}

    def _find_certain(self) -> int:
        """The column up to which cells right of an "X" can be told by counting.

        Without damage all of them. A row whose "X" is misplaced may have lost a cell of its own, or all rows lost a
        column: rows behind it that are in order, or a header that counts as many columns, speak for the former.
        """
        places = [(row.self_positions[0], self._place_of(row)) for row in self.rows if row.self_positions]
        limits = [min(self.damaged, default=self.num_columns)]
        misplaced = [mark for mark, place in places if mark != place]
        header = self.block.header
        is_named = header is not None and list(header.gpus) == self.columns == list(range(len(self.columns)))
        is_counted = header is not None and header.num_devices == self.num_columns
        if misplaced and not (is_named and is_counted):
            in_order = [place for mark, place in places if mark == place]
            limits.append(max(min(misplaced), max(in_order, default=-1) + 1))
        return min(limits)

    def links(self) -> dict[Pair, str]:
        """Every pair to its class; where its two cells disagree, the farther."""
        claims: dict[Pair, list[_Claim]] = {pair: [] for pair in all_pairs(self.num_gpus)}
        for row in self.rows:
            for other, claim in self._read(row):
                claims[min(row.gpu, other), max(row.gpu, other)].append(claim)
        return {pair: self._agree(pair, made) for pair, made in claims.items()}

    def _read(self, row: Row) -> Iterator[tuple[int, _Claim]]:
        """The claims of a row: the other GPU and its link."""
        if bad := [cell for cell in row.cells if _is_unreadable(cell)]:
            self.warnings.append(f"GPU{row.gpu}: {len(bad)} cells cannot be read")
        for place, column in self._usable(row):
            cell = row.cells[place]
            is_last = place == len(row.cells) - 1 and not any(row.tail)
            is_beyond = column >= len(self.columns) or (column > self._place_of(row) and column >= self.certain_to)
            if is_beyond or column in self.damaged or not is_link(cell):
                continue
            if is_last and self._may_be_clipped(cell, row):
                self.warnings.append(f"GPU{row.gpu}: the row ends in {cell}, which may be clipped")
                continue
            yield self.columns[column], _Claim(cell, is_last)

    def _usable(self, row: Row) -> Iterator[tuple[int, int]]:
        """(place in the row, column) of each cell whose column is certain.

        The cells left of the "X" are counted by it. Those right of it need a row of full length, or one that the
        end of the text cut. If a cell was lost on the left, the right still counts from the end.
        """
        place = self._place_of(row)
        if not row.self_positions:
            yield from ((index, index) for index in range(len(row.cells)))
            return
        mark = row.self_positions[0]
        num_missing = self.num_columns - len(row.cells)
        is_cut = num_missing > 0 and row is self.block.rows[-1] and not any(row.tail)
        if mark == place:
            last = len(row.cells) if num_missing == 0 or is_cut else mark
            yield from ((index, index) for index in range(last))
        elif num_missing == place - mark:
            yield from ((index, index + num_missing) for index in range(mark + 1, len(row.cells)))
        if num_missing and not is_cut:
            self.warnings.append(f"GPU{row.gpu}: {len(row.cells)} cells instead of {self.num_columns}")
        elif mark != place:
            self.warnings.append(f"GPU{row.gpu}: its X stands in column {mark}: the row is not used")

    def _may_be_clipped(self, cell: str, row: Row) -> bool:
        """Whether the cell that ends a line may be the front of a longer NV#."""
        if not num_nvlinks(cell):
            return False
        others = {other for line in self.rows for other in (line.cells if line is not row else line.cells[:-1])}
        is_alone = len(row.cells) < self.num_columns and cell not in others
        return is_alone or any(other.startswith(cell) and other != cell for other in others)

    def _agree(self, pair: Pair, claims: list[_Claim]) -> str:
        """The link of a pair from what its cells say."""
        links = {claim.link for claim in claims}
        if len(links) < 2:
            return claims[0].link if claims else UNKNOWN
        for weak, strong in (claims, claims[::-1]):
            if weak.is_weak and num_nvlinks(weak.link) and strong.link.startswith(weak.link):
                return strong.link
        link = farther(claims[0].link, claims[1].link)
        self.warnings.append(f"GPU{pair[0]}-GPU{pair[1]}: {claims[0].link} in one row, {claims[1].link} in the other")
        return link


def _run_length(numbers: list[int]) -> int:
    """How many of `numbers`, from the first, count up by one."""
    return next((place for place, number in enumerate(numbers) if number != numbers[0] + place), len(numbers))


def _is_unreadable(cell: str) -> bool:
    return cell == UNKNOWN or cell in PEER_STATUSES
