"""The benchmark's picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from benchmarks.summary import Report
from benchmarks.workload import WAYS

STACK = {  # bottom to top: parts of a chain, their names and colours
    "producer_write": ("encoder's write", "#9aa5b1"),
    "producer_passing": ("passing, to and from the producer", "#c8553d"),
    "consumer_passing": ("passing, to and from the consumer", "#e6a15c"),
    "consumer_copy": ("decoder's copy", "#c9d1d9"),
}
COLOURS = {"tensor": "#c8553d", "handle": "#2f6f8f"}


def draw(report: Report, facts: Mapping[str, object], path: Path) -> None:
    """Writes a picture of a report: where the median chain's time goes, and how passing is distributed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), constrained_layout=True)
    _draw_stack(left, report)
    _draw_distribution(right, report)
    machine = facts["machine"]
    assert isinstance(machine, Mapping)
    figure.suptitle("One 4.7 MB embedding from producer to consumer through BLS", fontsize=11)
    figure.supxlabel(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']}; commit {facts['commit']}",
        fontsize=7,
        color="#555555",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_stack(axes: Axes, report: Report) -> None:
    bottom = np.zeros(len(WAYS))
    for part, (label, colour) in STACK.items():
        heights = np.array([report.round.figures[name][part].p50_ms for name in WAYS])
        axes.bar(WAYS, heights, bottom=bottom, width=0.55, label=label, color=colour)
        bottom += heights
    axes.set_ylabel("ms, medians of the parts")
    axes.set_title(f"whole chain: {report.round.ratio('chain'):.1f} times as fast by handle", fontsize=9)
    axes.legend(fontsize=7, frameon=False)


def _draw_distribution(axes: Axes, report: Report) -> None:
    for name in WAYS:
        values = np.sort(report.round.passing_ms[name])
        axes.plot(values, np.arange(1, values.size + 1) / values.size, label=name, color=COLOURS[name])
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20)
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ms")
    axes.set_ylabel("share of chains that took at most that")
    axes.set_title(f"passing alone: {report.ratio:.1f} times as fast by handle", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
