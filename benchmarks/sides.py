"""What makes devices take sides: hybrids with and without each part of the price of decoding beside an encoder.

`python -m benchmarks.sides` simulates LLaVA-1.5-7B on A100-80 with NVLink (128 tokens of answer, 2,048 tokens a step,
nothing else tuned) where encodes are cheap and where they are dear. In each cell it finds the goodput of always serial,
of every split, and of hybrids with encoders on all GPUs and on as many as the best split has: as the policy is, without
following the demand (`scheduler.demand`), and with other values of its two chosen numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pool
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
from tqdm import tqdm

from benchmarks.arguments import at_least_one
from benchmarks.hybrid import GPU, RESULTS, start_worker
from benchmarks.provenance import provenance
from scheduler.advise.goodput import Question, find_goodput
from scheduler.advise.share import guess_per_s, shares_of
from scheduler.fleet import Layout, Tuning, describe_machine, hybrid, plan_of, serial, splits
from scheduler.output_file import output_file
from scheduler.roofline import roofline
from scheduler.simulate.outcome import Limits
from scheduler.simulate.report import table
from scheduler.simulate.workload import Mix, Workload, poisson

CELLS = (  # GPUs, images, ms to encode one, seconds to the first token, ms per token
    (8, 4, 10, 2, 50),
    (8, 2, 10, 2, 50),
    (8, 2, 10, 2, 200),
    (4, 8, 10, 2, 200),
    (2, 1, 40, 5, 200),
    (4, 1, 40, 5, 200),
    (8, 8, 40, 5, 100),
    (4, 2, 160, 5, 200),
    (8, 1, 160, 5, 200),
    (8, 1, 640, 5, 200),
)
WAYS = ("as it is", "no demand", "own loss 0", "own loss 1", "sharers 0", "sharers 1")
SEEDS = (1, 2)
HORIZON_S = 60.0

Cell = tuple[int, int, float, float, float]


@contextmanager
def changed(way: str) -> Iterator[None]:
    """The policy with one part of it changed."""
    name, _, value = way.rpartition(" ")
    if way == "no demand":
        with patch("scheduler.board.Demand", lambda _: None):
            yield
    elif name in ("own loss", "sharers"):
        place = "scheduler.demand.COUNTED_SHARE" if name == "own loss" else "scheduler.board.USUAL_SHARE"
        with patch(place, float(value)):
            yield
    else:
        yield


def measure(cell: Cell) -> dict[str, Any]:
    """Goodput of every way in one cell, the mean over the seeds."""
    num_gpus, images, encode_ms, ttft_s, tpot_ms = cell
    costs = roofline(GPU)
    encode = costs.encode.model_copy(update={"batch_s": 0.0, "image_s": encode_ms / 1000})
    costs = costs.model_copy(update={"encode": encode})
    mix = Mix(images=images, output_tokens=128)

    def make(count: int, rate_per_s: float, seed: int) -> Workload:
        chance = np.random.default_rng(seed)
        return mix.draw(poisson(count, rate_per_s, chance), chance)

    question = Question(make, Limits(ttft_s, tpot_ms / 1000), costs, HORIZON_S)
    machine, shares = describe_machine(num_gpus, GPU), shares_of(make(10, 1.0, 1), costs)

    def goodput(layout: Layout) -> float:
        guess = guess_per_s(shares, layout.num_encoders, layout.num_decoders, layout.is_hybrid)
        plan = plan_of(machine, layout, Tuning(step_limit_ms=500))
        return fmean(find_goodput(question, plan, guess, seed) for seed in SEEDS)

    fixed = {layout.name: goodput(layout) for layout in (serial(num_gpus), *splits(num_gpus))}
    best = max(splits(num_gpus), key=lambda layout: fixed[layout.name])
    told: dict[str, dict[str, float]] = {}
    for way in WAYS:
        with changed(way):
            told[way] = {name: goodput(hybrid(num_gpus, count)) for name, count in _counts(num_gpus, best)}
    return {"cell": cell, "fixed": fixed, "split": best.name, "hybrid": told}


def _counts(num_gpus: int, split: Layout) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("all", num_gpus), ("as split", split.num_encoders)


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Hybrids in times of the better fixed choice: with encoders on all GPUs / on as many as in the best split."""
    lines = [["GPUS", "IMAGES", "ENCODE", "TPOT", "SERIAL", "BEST SPLIT", "", *(way.upper() for way in WAYS)]]
    for row in rows:
        num_gpus, images, encode_ms, _, tpot_ms = row["cell"]
        fixed, ways = row["fixed"], row["hybrid"]
        top = max(fixed.values())
        shares = [f"{ways[way]['all'] / top:.2f} / {ways[way]['as split'] / top:.2f}" for way in WAYS]
        head = [str(num_gpus), str(images), f"{encode_ms} ms", f"{tpot_ms} ms"]
        split = str(row["split"])
        rates = [f"{fixed['serial']:.2f}", f"{fixed[split]:.2f}"]
        lines.append([*head, *rates, split.removeprefix("split "), *shares])
    return "\n".join(table(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sides", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=at_least_one, default=1, help="cells that are looked at at once (%(default)s)")
    parser.add_argument("--out", type=output_file, default=RESULTS / "sides.json", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    with Pool(arguments.jobs, start_worker) as pool:
        rows = list(tqdm(pool.imap(measure, CELLS), desc="cells", unit="cell", total=len(CELLS)))
    report = provenance("benchmarks.sides", argv, ("scheduler", "benchmarks/sides.py"))
    arguments.out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
    print(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
