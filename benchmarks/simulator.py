"""How fast the simulator is: a million requests over 256 GPUs, and whether time grows with requests only.

`python -m benchmarks.simulator` serves the production-like mix (half of the requests carry images) on 32 machines of 8
H100, half of which encode and half decode, behind one router, at seven tenths of what they can do. CPU time counts,
since other processes take the wall clock's; the largest run is a process of its own, for its memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.decide import plan_of
from benchmarks.provenance import provenance
from scheduler.output_file import output_file
from scheduler.profile import DecodeTable, LimitsTable
from scheduler.simulate.azure import azure
from scheduler.simulate.outcome import Limits, check, figures
from scheduler.simulate.run import Options
from scheduler.simulate.simulation import simulate
from scheduler.simulate.workload import poisson

RESULTS = Path(__file__).parent / "results"
NUM_DEVICES = 256
RATE_PER_S = 1000.0
COUNTS = (62_500, 250_000, 1_000_000)
LIMIT_S, LIMIT_GIB = 60.0, 2.0
GROWTH = 1.15  # the time per request of the most over that of the fewest


def measure(count: int) -> dict[str, float]:
    """One run: seconds of CPU and of wall clock, memory, and what the clients saw."""
    gc.disable()  # the simulator leaves no cycles behind
    plan = plan_of(NUM_DEVICES).model_copy(
        update={
            "decode": DecodeTable(max_sequences=128, kv_cache_mib=57344),
            "limits": LimitsTable(max_waiting=100_000),
        }
    )
    chance = np.random.default_rng(1)
    workload = azure(poisson(count, RATE_PER_S, chance), chance)
    began_s, cpu_s = perf_counter(), process_time()
    run = simulate(plan, workload, None, Options(max_in_flight=128 * NUM_DEVICES))
    cpu_s, wall_s = process_time() - cpu_s, perf_counter() - began_s
    check(run.outcomes, workload)
    told = figures(run.outcomes, Limits())
    return {
        "num_requests": count,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "us_per_request": round(cpu_s / count * 1e6, 1),
        "max_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2, 2),
        "simulated_s": round(run.duration_s, 1),
        "requests_per_s": round(told.requests_per_s, 1),
        "ttft_p90_s": round(told.ttft_s.p90, 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; 1 when a promise is broken."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=at_least_one, help="one run of so many requests, as JSON")
    parser.add_argument("--out", type=output_file, default=RESULTS / "simulator.json", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.count:
        print(json.dumps(measure(arguments.count)))
        return 0
    rows = []
    for count in COUNTS:
        command = [sys.executable, "-m", "benchmarks.simulator", "--count", str(count)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
    most, growth = rows[-1], rows[-1]["us_per_request"] / rows[0]["us_per_request"]
    faults = []
    if most["cpu_s"] > LIMIT_S:
        faults.append(f"{most['cpu_s']} s for {most['num_requests']} requests, allowed: {LIMIT_S:g}")
    if most["max_rss_gib"] > LIMIT_GIB:
        faults.append(f"{most['max_rss_gib']} GiB, allowed: {LIMIT_GIB:g}")
    if growth > GROWTH:
        faults.append(f"a request of {most['num_requests']} takes {growth:.2f} times one of {rows[0]['num_requests']}")
    report = {**provenance("benchmarks.simulator", argv, ("scheduler", "benchmarks/simulator.py")), "rows": rows}
    arguments.out.write_text(json.dumps({**report, "growth": round(growth, 3), "faults": faults}, indent=2) + "\n")
    print("\n".join(f"NOT HELD: {fault}" for fault in faults) or f"held: growth {growth:.2f}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
