"""The simulator against the real server: the same requests on cpu_pools, at light load, near capacity and over it.

`python -m benchmarks.validation` starts the server of deploy/profiles/cpu_pools.toml (two encoders on CPU 0, two
decoders on CPU 1), measures its costs as `vlm-relay profile` does, and sends the requests of a trace, each with a
picture of its own and exactly 32 tokens of answer. Then it simulates the same trace.

On two CPUs the stages are not alone: client, tritonserver and relay use the same ones, and so does whatever else runs
on the machine. Both are measured from /proc, not fitted: the CPU time in front per request (at the light load), and the
share of the CPUs that others took during each run, by which all work takes longer. How the time in front is divided
between before and after the first token follows from requests that find everything idle. `--again FILE` simulates a
recorded run anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processor_time import processor_time
from benchmarks.provenance import provenance
from client.load import Load
from client.load_plan import Arrival
from launcher.profile import Profiler, costs_from, to_json
from launcher.serve import plan_of, running
from python_backend.checkpoint import PROJECT_ROOT, read_facts, resolve
from scheduler.cost import Costs, parse_costs
from scheduler.plan import Plan
from scheduler.simulate.desk import FrontCost
from scheduler.simulate.outcome import Limits, figures
from scheduler.simulate.report import table
from scheduler.simulate.run import Options
from scheduler.simulate.simulation import simulate
from scheduler.simulate.workload import Mix, Workload, poisson, together

RESULTS = Path(__file__).parent / "results"
PROFILE = PROJECT_ROOT / "deploy" / "profiles" / "cpu_pools.toml"
SHARES = {"light": 0.3, "near capacity": 0.85, "over": 1.3}
SECONDS = 40.0
OUTPUT_TOKENS = 32
NUM_ALONE = 15
TOLERANCE = 0.15
MEASURES = ("ttft_mean_s", "ttft_p90_s", "requests_per_s")


def workload_of(arrived_s: Sequence[float], prompt_tokens: int, num_users: int = 0) -> Workload:
    """One picture each, none twice."""
    mix = Mix(images=1, text_tokens=prompt_tokens - 576, output_tokens=OUTPUT_TOKENS)
    return mix.draw(np.asarray(arrived_s, dtype=float), np.random.default_rng(1), num_users)


def send(url: str, arrived_s: Sequence[float]) -> dict[str, Any]:
    """The real server under these arrivals: what became of each request, and who used the CPUs."""
    began_s, before = time.monotonic(), processor_time()
    load = Load(url, "What is in the picture?", [(336, 336)], random.Random(len(arrived_s)))
    load.options = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "min_tokens": OUTPUT_TOKENS}
    asyncio.run(load.measured(load.at_times([Arrival(at_s) for at_s in arrived_s])))
    used, seconds = processor_time().since(before), time.monotonic() - began_s
    outcomes = [asdict(outcome) for outcome in sorted(load.outcomes, key=lambda each: each.at_s)]
    others = used.others_s / (seconds * (os.cpu_count() or 1))
    return {"outcomes": outcomes, "seconds": seconds, "cpu": asdict(used), "others_share": others}


def of_real(outcomes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures of a real run; nobody is left out but those who were refused."""
    done = [each for each in outcomes if each["error"] is None]
    ttft_s = np.array([each["ttft_s"] + each["late_s"] for each in done])
    ended_s = max(each["at_s"] + each["late_s"] + each["total_s"] for each in done)
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p90_s": float(np.percentile(ttft_s, 90)),
        "requests_per_s": len(done) / (ended_s - outcomes[0]["at_s"]),
        "num_refused": float(len(outcomes) - len(done)),
    }


def of_simulated(
    plan: Plan, costs: dict[str, Costs], front: FrontCost, others_share: float, workload: Workload
) -> dict[str, float]:
    """The figures of the simulated server."""
    run = simulate(plan, workload, costs, Options(front=front, stretch=1 / (1 - others_share)))
    told = figures(run.outcomes, Limits(), warm_up=0.0)
    return {
        "ttft_mean_s": told.ttft_s.mean,
        "ttft_p90_s": told.ttft_s.p90,
        "requests_per_s": told.requests_per_s,
        "num_refused": float(told.num_requests - told.num_by_outcome.get("done", 0)),
    }


def front_of(record: dict[str, Any], plan: Plan, costs: dict[str, Costs]) -> FrontCost:
    """CPU time in front per request. Before the first token: what a request alone takes beyond its stages."""
    alone, light = record["alone"], record["runs"]["light"]
    whole_s = light["cpu"]["front_s"] / len(light["outcomes"])
    told_s = float(np.median([each["ttft_s"] for each in alone["outcomes"]][3:]))
    workload = workload_of([0.0], record["prompt_tokens"])
    stages_s = of_simulated(plan, costs, FrontCost(), alone["others_share"], workload)["ttft_mean_s"]
    before_s = min(whole_s, max(0.0, (told_s - stages_s) * (1 - alone["others_share"])))
    return FrontCost(before_s, whole_s - before_s)


def record_run() -> dict[str, Any]:
    """Costs, and what the real server did with each load."""
    plan = plan_of(PROFILE, None)
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    log_path = PROJECT_ROOT / "build" / "validation.log"
    log_path.parent.mkdir(exist_ok=True)
    with log_path.open("w") as log, running(plan, ("127.0.0.1", 0, 0, 0), os.environ, say, log) as server:
        url = f"127.0.0.1:{server.ports.grpc}"
        findings = Profiler(plan, read_facts(resolve(plan.checkpoint)), url).run()
        costs = costs_from(findings, plan, "measured on cpu_pools")
        alone = send(url, [index * 1.0 for index in range(NUM_ALONE)])
        prompt_tokens = alone["outcomes"][-1]["num_input_tokens"]
        light = send(url, poisson(80, 2.0, np.random.default_rng(2)).tolist())
        front = front_of({"alone": alone, "runs": {"light": light}, "prompt_tokens": prompt_tokens}, plan, costs)
        workload = workload_of(together(400), prompt_tokens, num_users=48)
        closed = simulate(plan, workload, costs, Options(front=front, stretch=1 / (1 - light["others_share"])))
        capacity = figures(closed.outcomes, Limits()).requests_per_s
        runs = {}
        for name, share in SHARES.items():
            rate = capacity * share
            arrived_s = poisson(int(rate * SECONDS), rate, np.random.default_rng(3)).tolist()
            runs[name] = {"rate_per_s": rate, **send(url, arrived_s)}
    told = {"capacity_per_s": capacity, "prompt_tokens": prompt_tokens, "alone": alone, "runs": runs}
    return {**told, "costs": json.loads(to_json(costs))}


def compare(record: dict[str, Any]) -> tuple[list[list[str]], list[str], dict[str, Any]]:
    """The table, what is outside the tolerance, and the figures."""
    plan = plan_of(PROFILE, None)
    costs = parse_costs(json.dumps(record["costs"]), "the recorded run")
    front = front_of(record, plan, costs)
    rows, faults, told = [["LOAD", "", "REAL", "SIMULATED", "OFF BY"]], [], {}
    for name, run in record["runs"].items():
        arrived_s = [each["at_s"] for each in run["outcomes"]]
        real = of_real(run["outcomes"])
        workload = workload_of(arrived_s, record["prompt_tokens"])
        simulated = of_simulated(plan, costs, front, run["others_share"], workload)
        others = round(run["others_share"], 3)
        told[name] = {"rate_per_s": run["rate_per_s"], "others_share": others, "real": real, "simulated": simulated}
        for measure in MEASURES:
            error = simulated[measure] / real[measure] - 1
            head = f"{name}, {run['rate_per_s']:.1f}/s" if measure == MEASURES[0] else ""
            rows.append([head, measure, f"{real[measure]:.4g}", f"{simulated[measure]:.4g}", f"{error:+.1%}"])
            if abs(error) > TOLERANCE:
                faults.append(f"{measure} at {name} is off by {error:+.1%}, allowed: {TOLERANCE:.0%}")
    return rows, faults, {"front": asdict(front), "loads": told}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, simulates, prints, writes; 1 when a figure is outside the tolerance."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--again", type=Path, metavar="FILE", help="simulate the real run recorded in FILE")
    parser.add_argument("--record", type=Path, default=RESULTS / "validation_run.json", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "validation.json", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.again is None:
        measured = ("scheduler", "python_backend", "launcher", "benchmarks/validation.py")
        record = {**provenance("benchmarks.validation", argv, measured), **record_run()}
        arguments.record.write_text(json.dumps(record) + "\n")
    else:
        record = json.loads(arguments.again.read_text())
    rows, faults, told = compare(record)
    print("\n".join(table(rows)))
    print(
        f"in front of the stages: {told['front_s'] * 1000:.1f} ms; capacity {record['capacity_per_s']:.1f} requests/s"
    )
    report = {key: record[key] for key in ("command", "date", "commit", "machine", "versions")}
    simulated = provenance("benchmarks.validation", argv, ("scheduler", "benchmarks/validation.py"))["commit"]
    whole = {**report, "simulated_by": simulated, **told, "faults": faults}
    arguments.out.write_text(json.dumps(whole, indent=2) + "\n")
    print("\n".join(f"NOT HELD: {fault}" for fault in faults) or "held")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
