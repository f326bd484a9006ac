"""Whether deciding per request is ever worse than deciding once: hybrid GPUs against always serial and always split.

`python -m benchmarks.hybrid` simulates LLaVA-1.5-7B on A100-80 with NVLink by rooflines: 1, 2, 4 or 8 images per
request, 2, 4 or 8 GPUs, an encoder of captured graphs (2.5 ms per image) or an eager one (10 ms, as seen without
graphs), and 50 or 200 ms per token at most. In each cell every layout is tuned (chunk, step limit, encode batch), the
splits in every ratio, and its goodput found over three seeds: the highest rate at which 90 % of the requests have their
first token within 2 s and the others within the limit. The claim: `cost` over hybrids reaches 0.98 of the better of
always serial and always split.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
from collections.abc import Sequence
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.arguments import at_least_one
from benchmarks.provenance import provenance
from scheduler.advise.goodput import Question
from scheduler.advise.search import Result, compare
from scheduler.advise.share import shares_of
from scheduler.cost import Costs
from scheduler.fleet import describe_machine
from scheduler.output_file import output_file
from scheduler.roofline import roofline
from scheduler.simulate.outcome import Limits
from scheduler.simulate.report import table
from scheduler.simulate.workload import Mix, Workload, poisson

RESULTS = Path(__file__).parent / "results"
GPU = "A100-SXM4-80GB"
GPUS, IMAGES, ENCODERS, TPOTS_MS = (2, 4, 8), (1, 2, 4, 8), ("graph", "eager"), (50, 200)
EAGER_IMAGE_S = 0.010
TTFT_S = 2.0
OUTPUT_TOKENS = 128
SEEDS = (1, 2, 3)
HORIZON_S = 60.0
LEAST_SHARE = 0.98


def costs_of(encoder: str) -> Costs:
    """Rooflines; the eager encoder takes its time for every image, batched or not."""
    costs = roofline(GPU)
    if encoder == "graph":
        return costs
    encode = costs.encode.model_copy(update={"batch_s": 0.0, "image_s": EAGER_IMAGE_S})
    return costs.model_copy(update={"encode": encode})


def cell(case: tuple[int, int, str, int]) -> dict[str, object]:
    """All layouts of one cell: GPUs, images per request, encoder, ms per token."""
    num_gpus, images, encoder, tpot_ms = case
    mix, costs = Mix(images=images, output_tokens=OUTPUT_TOKENS), costs_of(encoder)

    def make(count: int, rate_per_s: float, seed: int) -> Workload:
        chance = np.random.default_rng(seed)
        return mix.draw(poisson(count, rate_per_s, chance), chance)

    question = Question(make, Limits(TTFT_S, tpot_ms / 1000), costs, HORIZON_S)
    machine = describe_machine(num_gpus, GPU)
    results = compare(question, machine, shares_of(make(10, 1.0, 1), costs), SEEDS)
    serial = _best([each for each in results if each.layout.policy == "serial"])
    split = _best([each for each in results if not each.layout.is_hybrid])
    hybrid = _best([each for each in results if each.layout.is_hybrid and each.layout.policy == "cost"])
    shares = [
        each / max(one, other)
        for each, one, other in zip(hybrid["by_seed"], serial["by_seed"], split["by_seed"], strict=True)
    ]
    return {
        "gpus": num_gpus,
        "images": images,
        "encoder": encoder,
        "tpot_ms": tpot_ms,
        "serial": serial,
        "split": split,
        "hybrid": hybrid,
        "share": round(sum(hybrid["by_seed"]) / max(sum(serial["by_seed"]), sum(split["by_seed"])), 4),
        "share_by_seed": [round(each, 4) for each in shares],
    }


def _best(results: Sequence[Result]) -> dict[str, list[float]]:
    """The best of some layouts; a split that was left out early has one seed, which stands for all."""
    best = max(results, key=lambda each: each.mean_per_s)
    by_seed = list(best.goodput_per_s) * (1 if best.is_tuned else len(SEEDS))
    tuning = best.tuning
    told = {"by_seed": [round(each, 3) for each in by_seed], "layout": best.layout.name}
    return {**told, "tuning": [tuning.step_tokens, tuning.max_batch, tuning.step_limit_ms]}  # type: ignore[dict-item]


def render(rows: Sequence[dict[str, object]]) -> str:
    """The worst cell first."""
    lines = [["GPUS", "IMAGES", "ENCODER", "TPOT", "SERIAL", "BEST SPLIT", "", "HYBRID", "", "SHARE"]]
    for row in sorted(rows, key=lambda each: float(str(each["share"]))):
        sides = [row[name] for name in ("serial", "split", "hybrid")]
        mean = [f"{np.mean(side['by_seed']):.2f}" for side in sides]  # type: ignore[index]
        names = [side["layout"] for side in sides]  # type: ignore[index]
        head = [str(row["gpus"]), str(row["images"]), str(row["encoder"]), f"{row['tpot_ms']} ms"]
        lines.append([*head, mean[0], mean[1], names[1], mean[2], names[2], f"{row['share']:.3f}"])
    return "\n".join(table(lines))


def start_worker() -> None:
    """What each process of a pool does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends them
    gc.disable()  # simulations leave no cycles behind


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; 1 when the claim is broken."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrid", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=at_least_one, nargs="+", default=GPUS, help="numbers of GPUs (2 4 8)")
    parser.add_argument("--images", type=at_least_one, nargs="+", default=IMAGES, help="images per request (1 2 4 8)")
    parser.add_argument("--jobs", type=at_least_one, default=1, help="cells that are looked at at once (%(default)s)")
    parser.add_argument("--out", type=output_file, default=RESULTS / "hybrid.json", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    cases = [(g, i, e, t) for g in arguments.gpus for i in arguments.images for e in ENCODERS for t in TPOTS_MS]
    with Pool(arguments.jobs, start_worker) as pool:
        rows = list(tqdm(pool.imap(cell, cases), desc="cells", unit="cell", total=len(cases)))
    report = provenance("benchmarks.hybrid", argv, ("scheduler", "benchmarks/hybrid.py"))
    arguments.out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
    print(render(rows))
    worst = min(float(str(row["share"])) for row in rows)
    print(f"{'held' if worst >= LEAST_SHARE else 'NOT HELD'}: {worst:.3f} in the worst cell, {LEAST_SHARE} claimed")
    return 0 if worst >= LEAST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
