"""From the records of the chain model to figures; pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.workload import WAYS, Column

NS_PER_MS = 1e6
MIB = 1 << 20
# Of each part of a chain, the columns that make it up.
PARTS: Mapping[str, tuple[tuple[Column, int], ...]] = {
    "chain": ((Column.PRODUCER_HOP, 1), (Column.CONSUMER_HOP, 1)),
    "passing": (
        (Column.PRODUCER_HOP, 1),
        (Column.PRODUCER_WORK, -1),
        (Column.CONSUMER_HOP, 1),
        (Column.CONSUMER_WORK, -1),
    ),
    "producer_hop": ((Column.PRODUCER_HOP, 1),),
    "producer_write": ((Column.PRODUCER_WORK, 1),),
    "producer_passing": ((Column.PRODUCER_HOP, 1), (Column.PRODUCER_WORK, -1)),
    "consumer_hop": ((Column.CONSUMER_HOP, 1),),
    "consumer_copy": ((Column.CONSUMER_WORK, 1),),
    "consumer_passing": ((Column.CONSUMER_HOP, 1), (Column.CONSUMER_WORK, -1)),
}
LABELS = {
    "chain": "whole chain",
    "producer_write": "  the encoder's write",
    "consumer_copy": "  the decoder's copy",
    "passing": "  passing: all the rest",
    "producer_hop": "hop to the producer",
    "consumer_hop": "hop to the consumer",
}

Records = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 90th percentile, in milliseconds."""

    p50_ms: float
    p90_ms: float

    @classmethod
    def of(cls, values_ms: npt.NDArray[np.float64]) -> Quantiles:
        """Those of some durations."""
        p50, p90 = np.percentile(values_ms, (50, 90))
        return cls(round(float(p50), 4), round(float(p90), 4))


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over both ways: quantiles by way and part, and how long passing took in every chain."""

    figures: dict[str, dict[str, Quantiles]]
    passing_ms: dict[str, npt.NDArray[np.float64]]

    @classmethod
    def of(cls, records: Records) -> Round:
        """The figures of records (chains, ways, columns)."""
        by_way = {name: records[:, place] for place, name in enumerate(WAYS)}
        figures = {
            name: {part: Quantiles.of(_part_ms(of_way, part)) for part in PARTS} for name, of_way in by_way.items()
        }
        return cls(figures, {name: _part_ms(of_way, "passing") for name, of_way in by_way.items()})

    def ratio(self, part: str, quantile: str = "p50_ms") -> float:
        """How many times longer tensors take."""
        tensor, handle = (getattr(self.figures[name][part], quantile) for name in WAYS)
        return float(tensor / handle)


@dataclass(frozen=True, slots=True)
class Growth:
    """What each way added to /dev/shm, and what the embedding store holds from the start, in bytes."""

    handle_bytes: int
    tensor_bytes: int
    store_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of one run; `round` is the median one of `rounds`."""

    round: Round
    rounds: tuple[Round, ...]
    growth: Growth
    grown_while_timed_bytes: int

    @property
    def ratio(self) -> float:
        """How many times faster handles pass, at the median of the median round."""
        return self.round.ratio("passing")

    def to_dict(self) -> dict[str, object]:
        """All but the single chains, for JSON."""
        return {
            "ratio": {
                "passing_p50": round(self.ratio, 2),
                "passing_p90": round(self.round.ratio("passing", "p90_ms"), 2),
                "chain_p50": round(self.round.ratio("chain"), 2),
                "chain_p90": round(self.round.ratio("chain", "p90_ms"), 2),
                "passing_p50_of_rounds": [round(one.ratio("passing"), 2) for one in self.rounds],
                "chain_p50_of_rounds": [round(one.ratio("chain"), 2) for one in self.rounds],
            },
            "figures": {
                name: {part: asdict(quantiles) for part, quantiles in parts.items()}
                for name, parts in self.round.figures.items()
            },
            "shared_memory": {**asdict(self.growth), "grown_while_timed_bytes": self.grown_while_timed_bytes},
            "checksums": "equal",
        }

    def table(self) -> str:
        """The figures as lines of text."""
        lines = [_line("p50 / p90, ms", WAYS, "ratio")]
        for part, label in LABELS.items():
            cells = [self.round.figures[name][part] for name in WAYS]
            texts = [f"{cell.p50_ms:.3f} / {cell.p90_ms:.3f}" for cell in cells]
            lines.append(_line(label, texts, f"{self.round.ratio(part):.2f}"))
        growth = [f"{value / MIB:.1f} MiB" for value in (self.growth.tensor_bytes, self.growth.handle_bytes)]
        lines.append(_line("growth of /dev/shm", growth, ""))
        lines.append(_line("embedding store, fixed", ("", f"{self.growth.store_bytes / MIB:.1f} MiB"), ""))
        ratios = ", ".join(f"{one.ratio('passing'):.2f}" for one in self.rounds)
        return "\n".join([*lines, f"passing, ratios of the rounds: {ratios}; checksums equal"])


def summarise(rounds: Sequence[Round], growth: Growth, grown_while_timed_bytes: int) -> Report:
    """The report of some rounds; of an even number of them the lower median one counts."""
    wanted = statistics.median_low([one.ratio("passing") for one in rounds])
    median = next(one for one in rounds if one.ratio("passing") == wanted)
    return Report(median, tuple(rounds), growth, grown_while_timed_bytes)


def _part_ms(records: Records, part: str) -> npt.NDArray[np.float64]:
    """How long a part took in each of the records (chains, columns) of one way."""
    return np.asarray(sum(sign * records[:, column] for column, sign in PARTS[part]) / NS_PER_MS)


def _line(label: str, cells: Sequence[str], ratio: str) -> str:
    return f"{label:25}{''.join(f'{cell:>17}' for cell in cells)}{ratio:>8}".rstrip()
