"""The founding article's figures, simulated from the costs that it gives: what follows from them, and what does not.

`python -m benchmarks.article`: 80 ms to encode an image, 1.2 s for 256 tokens, a transfer of 0.3 ms (NVLink) or 2.1 ms
(PCIe), and on one device together the encoder at 0.63 and the decoder at 1 / 2.3 of their speeds. Where the article
says nothing: the prompt's prefill is part of the 1.2 s (45 ms, roofline of an A100), a decode step costs the same
for up to 16 sequences but for their caches, and without peer access a copy takes 4.2 ms, twice PCIe.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.provenance import provenance
from scheduler.cost import EMBEDDING_BYTES, ContentionCost, Costs, EncodeCost, PrefillCost, TransferCost
from scheduler.fleet import Layout, LinkKind, Tuning, describe_machine, plan_of, serial
from scheduler.output_file import output_file
from scheduler.plan import Plan
from scheduler.roofline import roofline
from scheduler.simulate.outcome import Figures, Limits, figures
from scheduler.simulate.report import table
from scheduler.simulate.run import Options
from scheduler.simulate.simulation import simulate
from scheduler.simulate.workload import Mix, poisson, together

RESULTS = Path(__file__).parent / "results"
GPU = "A100-SXM4-80GB"
MIX = Mix(images=1, output_tokens=256)
TRANSFER_S: dict[LinkKind, float] = {"nvlink": 0.3e-3, "pcie": 2.1e-3, "none": 4.2e-3}
PREFILL_S, ANSWER_S, ENCODE_S = 0.045, 1.2, 0.080
SPLIT = Layout(1, 1, False)
NO_DELAY_BATCH = 1  # the article's encoder does not batch
SLOTS = 16
LIGHT_PER_S = 0.1
LOW_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0)


def costs_of(link: LinkKind) -> Costs:
    """The article's, over one kind of link."""
    found = roofline(GPU)
    step_s = (ANSWER_S - PREFILL_S) / 255
    rate = {"NV12": 1.0, "PHB": 1.0, "SYS": 1.0}
    return Costs(
        encode=EncodeCost(batch_s=0.0, image_s=ENCODE_S, max_batch=1),
        prefill=PrefillCost(start_s=0.0, token_s=PREFILL_S / 640),
        # The weights are read in the time of a step alone, less the cache of one request.
        decode=found.decode.model_copy(
            update={"weight_bytes": step_s * found.decode.bytes_per_s - 768 * found.decode.kv_bytes_per_token}
        ),
        transfer=TransferCost(
            hop_s=0.0,
            setup_s=0.0,
            staged_setup_s=0.0,
            gigabytes_per_s={name: EMBEDDING_BYTES / TRANSFER_S[link] / 1e9 * factor for name, factor in rate.items()},
        ),
        contention=ContentionCost(encode_speed=0.63, decode_speed=1 / 2.3),
        source="the founding article",
    )


def plan_for(layout: Layout, num_gpus: int, link: LinkKind, slots: int) -> Plan:
    """A plan whose decoders run at most `slots` sequences together; requests beyond wait."""
    plan = plan_of(describe_machine(num_gpus, GPU, link), layout, Tuning(max_sequences=slots, max_batch=NO_DELAY_BATCH))
    encode = plan.encode.model_copy(update={"queue_delay_us": 0})
    limits = plan.limits.model_copy(update={"max_waiting": 10**6})
    return plan.model_copy(update={"encode": encode, "limits": limits})


def closed(layout: Layout, num_gpus: int, link: LinkKind, users: int) -> Figures:
    """With so many users who always wait for an answer."""
    workload = MIX.draw(together(200 * users), np.random.default_rng(1), num_users=users)
    run = simulate(plan_for(layout, num_gpus, link, max(users, 1)), workload, costs_of(link))
    return figures(run.outcomes, Limits())


def opened(layout: Layout, num_gpus: int, link: LinkKind, rate_per_s: float, slots: int = SLOTS) -> Figures:
    """With requests at a rate."""
    chance = np.random.default_rng(1)
    workload = MIX.draw(poisson(1500, rate_per_s, chance), chance)
    run = simulate(plan_for(layout, num_gpus, link, slots), workload, costs_of(link), Options(max_in_flight=10**6))
    return figures(run.outcomes, Limits())


def throughput() -> dict[str, float]:
    """Requests per second of the arrangements that the article compares, and of fairer ones."""
    return {
        "serial, 1 GPU, one at a time": closed(serial(1), 1, "nvlink", 1).requests_per_s,
        "pipeline, 1 + 1 GPU, one at a time": closed(SPLIT, 2, "nvlink", 1).requests_per_s,
        "pipeline, 1 + 1 GPU, 2 in flight": closed(SPLIT, 2, "nvlink", 2).requests_per_s,
        "pipeline, 1 + 1 GPU, 3 in flight": closed(SPLIT, 2, "nvlink", 3).requests_per_s,
        "pipeline, 1 + 1 GPU, 4 in flight": closed(SPLIT, 2, "nvlink", 4).requests_per_s,
        "mixed, 1 GPU, 4 in flight": closed(serial(1), 1, "nvlink", 4).requests_per_s,
        "mixed, 2 GPUs, 8 in flight": closed(serial(2), 2, "nvlink", 8).requests_per_s,
        "pipeline, 1 + 1 GPU, 8 in flight": closed(SPLIT, 2, "nvlink", 8).requests_per_s,
    }


def tails() -> dict[str, float]:
    """How many times the P99 of serial a split takes at light load: over each link, and what 12 % would need."""
    alone = opened(serial(2), 2, "nvlink", LIGHT_PER_S).latency_s.p99
    found: dict[str, float] = {link: opened(SPLIT, 2, link, LIGHT_PER_S).latency_s.p99 / alone for link in TRANSFER_S}
    return {**found, "serial_p99_s": alone, "needed_s_for_12_percent": 0.12 * alone}


def whole_s(told: Figures) -> float:
    """Until the last token, at the mean."""
    return told.latency_s.mean


def first_s(told: Figures) -> float:
    """Until the first token, at the mean."""
    return told.ttft_s.mean


def crossing(
    link: LinkKind, serial_gpus: int, measure: Callable[[Figures], float], rates: Sequence[float]
) -> float | None:
    """The rate from which on a split of two GPUs is sooner than so many serial ones; None: at none of `rates`."""
    gains = []
    for rate in rates:
        one, other = opened(serial(serial_gpus), serial_gpus, link, rate), opened(SPLIT, 2, link, rate)
        gains.append(measure(one) - measure(other))
    for (low, before), (high, after) in pairwise(zip(rates, gains, strict=True)):
        if before <= 0 < after:
            return low + (high - low) * before / (before - after)
    return rates[0] if gains[0] > 0 else None


def crossings() -> dict[str, float | None]:
    """By link, for each fair question."""
    found: dict[str, float | None] = {}
    for link in TRANSFER_S:
        found[f"whole answer, against 1 serial GPU, {link}"] = crossing(link, 1, whole_s, LOW_RATES)
        found[f"first token, against 2 serial GPUs, {link}"] = crossing(link, 2, first_s, RATES)
        found[f"whole answer, against 2 serial GPUs, {link}"] = crossing(link, 2, whole_s, RATES)
    return dict(sorted(found.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Simulates, prints, writes."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.article", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=output_file, default=RESULTS / "article.json", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    rates, tail = throughput(), tails()
    sooner = crossings()
    first = next(iter(rates.values()))
    rows = [["", "REQUESTS/S", "TIMES THE FIRST"]]
    rows += [[name, f"{rate:.3f}", f"{rate / first:.2f}"] for name, rate in rates.items()]
    print("\n".join(table(rows)))
    print(f"\nP99 of the split at {LIGHT_PER_S:g} requests/s, in times of serial ({tail['serial_p99_s']:.3f} s):")
    print(", ".join(f"{link} {tail[link]:.4f}" for link in TRANSFER_S))
    print(f"the article's 1.12 would need {tail['needed_s_for_12_percent'] * 1000:.0f} ms more")
    print("\nThe split of two GPUs is sooner from so many requests/s on:")
    for name, rate in sooner.items():
        print(f"  {name}: {'at no rate' if rate is None else f'{rate:.2g}'}")
    report = provenance("benchmarks.article", argv, ("scheduler", "benchmarks/article.py"))
    told = {"throughput_per_s": rates, "tail": tail, "crossing_per_s": sooner}
    arguments.out.write_text(json.dumps({**report, **told}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
