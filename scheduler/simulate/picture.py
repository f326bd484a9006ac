"""Pictures of simulations: what each device did when, and latency and goodput against the rate."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.output_file import output_file
from scheduler.simulate.outcome import Figures, Limits
from scheduler.simulate.run import Run, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENCODE, PREFILL, DECODE = "#d97706", "#2563eb", "#93c5fd"
FORMATS = (".png", ".svg", ".pdf")
MOST_SPANS = 20_000  # in one picture; more cannot be told apart


def picture_file(told: str) -> Path:
    """The path of a picture that can be drawn and written; a `type` of argparse.

    Raises:
        argparse.ArgumentTypeError: another kind of file, one that cannot be written, or matplotlib is not installed.
    """
    path = Path(told)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"{told!r}: allowed endings are {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise argparse.ArgumentTypeError("matplotlib is not installed; pip install 'vlm-relay[plots]'") from None
    return output_file(told)


def draw_timeline(run: Run, path: Path, begin_s: float = 0.0, end_s: float | None = None) -> None:
    """A row per replica: encode batches, steps with prompts, decode steps; from `begin_s` to `end_s`.

    Before: the run kept its spans.
    """
    end_s = run.duration_s if end_s is None else end_s
    spans = [span for span in run.spans if span.began_s < end_s and span.ended_s > begin_s][:MOST_SPANS]
    names = [*(each.name for each in run.plan.encoders), *(each.name for each in run.plan.decoders)]
    figure = _new_figure(11, 1.2 + 0.32 * len(names))
    axes = figure.add_subplot()
    for row, name in enumerate(names):
        own = [span for span in spans if span.replica == name]
        for color, chosen in _by_kind(own).items():
            bars = [(span.began_s, max(span.ended_s - span.began_s, 1e-6)) for span in chosen]
            axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=color, edgecolors="white", linewidth=0.2)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(begin_s, end_s)
    axes.set_xlabel("time, s")
    for label, color in (("encode", ENCODE), ("step with prompts", PREFILL), ("decode steps", DECODE)):
        axes.barh(0, 0, color=color, label=label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1 + 0.9 / (1.2 + 0.32 * len(names))), ncols=3, frameon=False)
    _save(figure, path)


def _by_kind(spans: Sequence[Span]) -> Mapping[str, list[Span]]:
    return {
        ENCODE: [span for span in spans if span.num_images],
        PREFILL: [span for span in spans if span.num_prompt_tokens],
        DECODE: [span for span in spans if not span.num_images and not span.num_prompt_tokens],
    }


def draw_curves(curves: Mapping[str, Sequence[tuple[float, Figures]]], limits: Limits, path: Path) -> None:
    """Against the offered rate, a line per name: P50 and P90 of time to first token, time per token, goodput."""
    figure = _new_figure(11, 3.6)
    left, middle, right = figure.subplots(1, 3)
    for name, points in curves.items():
        rates = [rate for rate, _ in points]
        _line(left, rates, [told.ttft_s.p90 * 1000 for _, told in points], name)
        _line(middle, rates, [told.tpot_s.p90 * 1000 for _, told in points], name)
        _line(right, rates, [told.goodput_per_s for _, told in points], name)
    left.axhline(limits.ttft_s * 1000, color="grey", linestyle=":", linewidth=1)
    middle.axhline(limits.tpot_s * 1000, color="grey", linestyle=":", linewidth=1)
    top = max((rate for points in curves.values() for rate, _ in points), default=1.0)
    right.plot([0, top], [0, top], color="grey", linestyle=":", linewidth=1)
    left.set_yscale("log")
    left.set_title("time to first token, P90, ms", fontsize=10)
    middle.set_title("time per further token, P90, ms", fontsize=10)
    right.set_title("within the limits, requests/s", fontsize=10)
    for axes in (left, middle, right):
        axes.set_xlabel("offered, requests/s")
        axes.grid(alpha=0.2)
    if len(curves) > 1:
        left.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _line(axes: Axes, rates: Sequence[float], values: Sequence[float], name: str) -> None:
    axes.plot(rates, values, marker="o", markersize=3, linewidth=1.3, label=name)


def _new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # draws without a screen

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
