"""What a load test found: figures, and a page that shows them. Pure."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 99)
_CHART = (640, 160)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: `at_s` and `late_s` (sent after its time, since the load tool was busy) from the start."""

    at_s: float
    late_s: float
    ttft_s: float | None
    total_s: float
    num_input_tokens: int
    num_output_tokens: int
    tokens_per_s: float | None
    error: str | None  # its code, such as `unavailable`
    detail: str = ""  # the error in words


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one figure, in milliseconds."""

    name: str
    values: tuple[float, ...]  # by PERCENTILES; empty when there is none


@dataclass(frozen=True, slots=True)
class Failed:
    """The requests that failed with one code; `detail` is what the first of them was told."""

    code: str
    num_requests: int
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a whole load test."""

    num_requests: int
    num_answered: int
    errors: tuple[Failed, ...]  # most frequent first
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    spreads: tuple[Spread, ...]

    def text(self) -> str:
        """The figures in a few lines."""
        lines = [
            f"{self.num_answered} of {self.num_requests} answered in {self.seconds:.1f} s: "
            f"{self.requests_per_s:.2f} requests/s, {self.output_tokens_per_s:.1f} output tokens/s"
        ]
        lines += [f"  {each.num_requests} x {each.code}: {each.detail}" for each in self.errors]
        for spread in self.spreads:
            shown = "  ".join(f"p{p} {v:.1f}" for p, v in zip(PERCENTILES, spread.values, strict=False))
            lines.append(f"  {spread.name}, ms: {shown or '-'}")
        return "\n".join(lines)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` of the ordered values do not exceed (nearest rank)."""
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def report_from(outcomes: Sequence[Outcome], seconds: float) -> Report:
    """The figures of these outcomes, which took `seconds` in all."""
    answered = [outcome for outcome in outcomes if outcome.error is None]
    num_tokens = sum(outcome.num_output_tokens for outcome in answered)
    return Report(
        num_requests=len(outcomes),
        num_answered=len(answered),
        errors=_failed(outcomes),
        seconds=seconds,
        requests_per_s=len(answered) / seconds if seconds else 0.0,
        output_tokens_per_s=num_tokens / seconds if seconds else 0.0,
        spreads=(
            _spread("time to first token", [each.ttft_s for each in answered]),
            _spread("time per output token", [each.tokens_per_s and 1 / each.tokens_per_s for each in answered]),
            _spread("whole answer", [each.total_s for each in answered]),
            _spread("sent late", [each.late_s for each in outcomes]),
        ),
    )


def _failed(outcomes: Sequence[Outcome]) -> tuple[Failed, ...]:
    details: dict[str, str] = {}
    for each in outcomes:
        if each.error is not None:
            details.setdefault(each.error, each.detail)
    counts = Counter(each.error for each in outcomes if each.error is not None)
    return tuple(Failed(code, count, details[code]) for code, count in counts.most_common())


def _spread(name: str, seconds: Sequence[float | None]) -> Spread:
    ordered = sorted(each * 1000 for each in seconds if each is not None)
    return Spread(name, tuple(percentile(ordered, percent) for percent in PERCENTILES) if ordered else ())


def page(report: Report, outcomes: Sequence[Outcome], title: str) -> str:
    """An HTML page by itself: the figures, and the time to first token over the run."""
    per_token = [each.tokens_per_s and 1 / each.tokens_per_s for each in outcomes]
    heads = "".join(f"<th>p{percent}, ms" for percent in PERCENTILES)
    rows = "".join(
        f"<tr><th>{spread.name}" + "".join(f"<td>{value:.1f}" for value in spread.values) for spread in report.spreads
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f"<pre>{html.escape(report.text())}</pre><table><tr><th>{heads}{rows}</table>"
        f"<h2>Time to first token over the run</h2>{_chart(outcomes, [each.ttft_s for each in outcomes])}"
        f"<h2>Time per output token over the run</h2>{_chart(outcomes, per_token)}</html>"
    )


def _chart(outcomes: Sequence[Outcome], seconds: Sequence[float | None]) -> str:
    """A dot for each request that has this time, and a cross for each that failed."""
    width, height = _CHART
    points = [
        (each.at_s, time_s)
        for each, time_s in zip(outcomes, seconds, strict=True)
        if time_s is not None and each.error is None
    ]
    if not points:
        return "<p>No answer came."
    failed = [each.at_s for each in outcomes if each.error is not None]
    last_s = max(*(at_s for at_s, _ in points), *failed, 1e-9)
    highest_s = max(time_s for _, time_s in points) or 1.0
    places = [
        (4 + at_s / last_s * (width - 8), height - 4 - each_s / highest_s * (height - 8)) for at_s, each_s in points
    ]
    dots = "".join(f"<circle r=2 cx={x:.1f} cy={y:.1f} />" for x, y in places)
    crosses = "".join(
        f"<path d='M{x - 3:.1f} {height - 8}l6 6m0 -6l-6 6' />"
        for x in (4 + at / last_s * (width - 8) for at in failed)
    )
    words = f"0 to {last_s:.1f} s; highest {highest_s * 1000:.1f} ms" + (f"; {len(failed)} failed" if failed else "")
    return f"<svg viewBox='0 0 {width} {height}' role=img aria-label='{words}'>{dots}{crosses}</svg><p>{words}"


_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:44rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse}th,td{text-align:right;padding:.3rem .8rem;border-bottom:1px solid "
    "#8886}th:first-child{text-align:left}svg{width:100%;border-bottom:1px solid #8888;fill:#0b62c4}"
    "path{stroke:#b3261e;stroke-width:1.5}"
    "pre{overflow-x:auto}"
)
