"""The picture of a load test: both times over the run, and how they are spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from client.errors import InvalidRequest
from client.load_report import Outcome, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw: TypeAlias = Callable[[Report, Sequence[Outcome], str, Path], None]
_BLUE, _RED = "#0b62c4", "#b3261e"


def drawer() -> Draw:
    """What writes the picture.

    Raises:
        InvalidRequest: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"{error.name} is missing for --png: pip install 'vlm-relay[plots]'") from None

    def draw(report: Report, outcomes: Sequence[Outcome], title: str, path: Path) -> None:
        figure = Figure(figsize=(11, 6.5), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        (ttft, tpot), (late, spread) = figure.subplots(2, 2)
        _over_time(ttft, outcomes, "time to first token", [each.ttft_s for each in outcomes])
        _over_time(
            tpot, outcomes, "time per output token", [each.tokens_per_s and 1 / each.tokens_per_s for each in outcomes]
        )
        _over_time(late, outcomes, "whole answer", [each.total_s for each in outcomes])
        _spread(spread, outcomes)
        figure.suptitle(f"{title}\n{report.text().splitlines()[0]}", fontsize=11)
        figure.savefig(path, format="png")

    return draw


def _over_time(axes: Axes, outcomes: Sequence[Outcome], name: str, seconds: Sequence[float | None]) -> None:
    answered = [
        (outcome.at_s, value * 1000)
        for outcome, value in zip(outcomes, seconds, strict=True)
        if value is not None and outcome.error is None
    ]
    axes.scatter([at_s for at_s, _ in answered], [ms for _, ms in answered], s=12, color=_BLUE)
    failed = [outcome.at_s for outcome in outcomes if outcome.error is not None]
    if failed:
        axes.scatter(failed, [0.0] * len(failed), s=24, marker="x", color=_RED, label=f"{len(failed)} failed")
        axes.legend(frameon=False)
    axes.set(title=name, xlabel="sent at, s", ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def _spread(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    answered = [outcome for outcome in outcomes if outcome.error is None and outcome.ttft_s is not None]
    for name, colour, values in (
        ("time to first token", _BLUE, sorted((each.ttft_s or 0.0) * 1000 for each in answered)),
        ("whole answer", "#56616f", sorted(each.total_s * 1000 for each in answered)),
    ):
        parts = [(place + 1) / len(values) * 100 for place in range(len(values))]
        axes.step(values, parts, where="post", color=colour, label=name)
    axes.set(title="answered within", xlabel="ms", ylabel="% of the answers", ylim=(0, 101))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
