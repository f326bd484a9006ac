"""The pictures of docs/splitting.md: `python -m benchmarks.splitting`, after `article`, `published` and `hybrid`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks.article import LIGHT_PER_S, SPLIT, opened
from benchmarks.hybrid import GPU, RESULTS, costs_of
from benchmarks.provenance import provenance
from scheduler.advise.advice import Variation, vary
from scheduler.advise.goodput import Question
from scheduler.fleet import describe_machine, serial
from scheduler.output_file import output_file
from scheduler.simulate.outcome import Limits
from scheduler.simulate.workload import Mix, Workload, poisson

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
ENCODES_MS = (2.5, 10, 40, 160, 640)
GPUS = (2, 4, 8)
RATES = (0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
SERIAL, SPLIT_COLOUR, HYBRID = "#9aa5b1", "#c8553d", "#2f6f8f"


def make(count: int, rate_per_s: float, seed: int) -> Workload:
    """One image and 128 tokens of answer."""
    chance = np.random.default_rng(seed)
    return Mix(images=1, output_tokens=128).draw(poisson(count, rate_per_s, chance), chance)


def by_encode() -> dict[str, list[dict[str, float]]]:
    """Serial, the likeliest split and hybrid on each number of GPUs, as an encode gets dearer."""
    found: dict[str, list[dict[str, float]]] = {}
    cases = [(count, encode_ms) for count in GPUS for encode_ms in ENCODES_MS]
    for count, encode_ms in tqdm(cases, desc="encodes"):
        costs = costs_of("graph")
        encode = costs.encode.model_copy(update={"batch_s": 0.0, "image_s": encode_ms / 1000})
        dearer = costs.model_copy(update={"encode": encode})
        question = replace(Question(make, Limits(5.0, 0.2)), costs=dearer, horizon_s=60.0)
        told: Variation = vary(question, describe_machine(count, GPU), dearer, f"{encode_ms} ms")
        row = {
            "encode_ms": encode_ms,
            "serial": told.serial_per_s,
            "split": told.split_per_s,
            "hybrid": told.hybrid_per_s,
        }
        found.setdefault(str(count), []).append(row)
    return found


def draw_by_encode(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Split and hybrid in times of serial."""
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    for axes, (count, rows) in zip(figure.subplots(1, len(found), sharey=True), found.items(), strict=True):
        encodes = [row["encode_ms"] for row in rows]
        for name, colour in (("split", SPLIT_COLOUR), ("hybrid", HYBRID)):
            axes.plot(
                encodes, [row[name] / row["serial"] for row in rows], "o-", color=colour, label=name, markersize=3
            )
        axes.axhline(1, color=SERIAL, label="always serial")
        axes.set_xscale("log")
        axes.set_xticks(encodes, [f"{each:g}" for each in encodes])
        axes.minorticks_off()
        axes.set_title(f"{count} GPUs", fontsize=10)
        axes.set_xlabel("encode of one image, ms")
        axes.grid(alpha=0.2)
    figure.axes[0].set_ylabel("goodput, times always serial")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def draw_article(path: Path) -> list[dict[str, float]]:
    """First token and whole answer against the rate, with the article's costs: one or two serial GPUs, or a split."""
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = []
    ways = (
        ("1 GPU, serial", serial(1), 1, SERIAL),
        ("2 GPUs, serial", serial(2), 2, HYBRID),
        ("1 + 1, split", SPLIT, 2, SPLIT_COLOUR),
    )
    for name, layout, count, colour in ways:
        told = [opened(layout, count, "nvlink", rate) for rate in RATES]
        left.plot(RATES, [each.ttft_s.mean for each in told], "o-", color=colour, label=name, markersize=3)
        right.plot(RATES, [each.latency_s.mean for each in told], "o-", color=colour, label=name, markersize=3)
        pairs = zip(RATES, told, strict=True)
        rows += [{"way": name, "rate": r, "ttft_s": t.ttft_s.mean, "latency_s": t.latency_s.mean} for r, t in pairs]
    for axes, title, top in ((left, "first token, mean, s", 0.5), (right, "whole answer, mean, s", 6.0)):
        axes.set_ylim(0, top)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("requests/s")
        axes.grid(alpha=0.2)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    return rows  # type: ignore[return-value]


def draw_hybrid(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Every cell: the three ways in times of the better of the first two."""
    rows = sorted(rows, key=lambda row: row["share"])
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    axes: Axes = figure.subplots()
    best = [max(sum(row["serial"]["by_seed"]), sum(row["split"]["by_seed"])) for row in rows]
    for name, colour, marker in (("serial", SERIAL, "s"), ("split", SPLIT_COLOUR, "^"), ("hybrid", HYBRID, "o")):
        values = [sum(row[name]["by_seed"]) / top for row, top in zip(rows, best, strict=True)]
        axes.plot(range(len(rows)), values, marker, color=colour, label=name, markersize=4)
    axes.axhline(0.98, color="grey", linestyle=":", linewidth=1)
    names = [f"{row['gpus']}, {row['images']}, {row['encoder']}, {row['tpot_ms']}" for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=90, fontsize=6)
    axes.set_ylabel("goodput, times the better fixed choice")
    axes.set_xlabel("GPUs, images, encoder, ms per token", fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=130)


def draw_fan_out(rows: Sequence[dict[str, float]], path: Path) -> None:
    """EPD's times to first token, published and simulated."""
    figure = Figure(figsize=(5.5, 3.2), layout="constrained")
    axes: Axes = figure.subplots()
    images = [row["images"] for row in rows]
    for published, simulated, name, colour in (
        ("without_s", "together_s", "one device", SERIAL),
        ("epd_s", "spread_s", "spread over 6 encoders", HYBRID),
    ):
        axes.plot(images, [row[published] for row in rows], "o", color=colour, label=f"{name}, published")
        axes.plot(images, [row[simulated] for row in rows], "-", color=colour, label=f"{name}, simulated")
    axes.set_xticks(images)
    axes.set_ylim(0)
    axes.set_xlabel("images in a request (fitted on 2 and 4)")
    axes.set_ylabel("time to first token, s")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws all."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.splitting", description=__doc__)
    parser.add_argument(
        "--out", type=output_file, default=RESULTS / "splitting.json", help="the figures drawn (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    PICTURES.mkdir(parents=True, exist_ok=True)
    encodes = by_encode()
    draw_by_encode(encodes, PICTURES / "by_encode.png")
    article = draw_article(PICTURES / "article.png")
    draw_fan_out(json.loads((RESULTS / "published.json").read_text())["fan_out"], PICTURES / "fan_out.png")
    draw_hybrid(json.loads((RESULTS / "hybrid.json").read_text())["rows"], PICTURES / "hybrid.png")
    told = provenance("benchmarks.splitting", argv, ("scheduler", "benchmarks"))
    arguments.out.write_text(
        json.dumps({**told, "light_per_s": LIGHT_PER_S, "by_encode": encodes, "article": article}, indent=2) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
