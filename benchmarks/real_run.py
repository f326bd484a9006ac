"""The server of cpu_pools under loads, as `benchmarks.validation` records it: answers, stages, use of the CPUs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.processor_time import between, processor_time
from benchmarks.server_metrics import read_samples
from client.load import Load
from client.load_plan import Arrival
from client.load_report import Outcome
from launcher.profile import Profiler, costs_from, to_json
from launcher.serve import plan_of, running
from python_backend.checkpoint import PROJECT_ROOT, read_facts, resolve
from scheduler.simulate.workload import poisson

PROFILE = PROJECT_ROOT / "deploy" / "profiles" / "cpu_pools.toml"
# Share of the capacity, seconds, and how often, from an empty server: near capacity chance is largest.
LOADS = {"light": (0.3, 30.0, 1), "near capacity": (0.85, 60.0, 5), "over": (1.5, 30.0, 1)}
BETWEEN_S = 8.0
OUTPUT_TOKENS = 32
NUM_ALONE, PAUSE_S = 40, 0.5  # requests that find everything idle
NUM_CLOSED, NUM_USERS = 400, 80  # the closed loop that shows the capacity: as many as both decoders hold
IDLE_S = 8.0
QUIET_SHARE = 0.04  # of the CPUs, that others may take while something is measured
MOST_TRIES = 6

Result = TypeVar("Result")
_seeds = itertools.count()


@dataclass(frozen=True, slots=True)
class Target:
    """The server: where requests go, and where its metrics are."""

    url: str
    metrics_url: str

    def sums(self) -> dict[str, float]:
        """Sums and counts of its histograms, over all replicas."""
        found: dict[str, float] = {}
        for sample in read_samples(self.metrics_url):
            if sample.name.startswith("vlm_relay_") and sample.name.endswith(("_sum", "_count")):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


def quietly(measure: Callable[[], Result], what: str) -> tuple[Result, float, int]:
    """What was measured while nobody else used the CPUs: as often as it takes, or else the quietest of several tries.

    With it the share of the CPUs that others took, and the number of tries.
    """
    found: list[tuple[float, int, Result]] = []
    for number in range(1, MOST_TRIES + 1):
        before, began_s = processor_time(), time.monotonic()
        result = measure()
        others_s = between(before, processor_time())["others"]
        share = others_s / ((time.monotonic() - began_s) * (os.cpu_count() or 1))
        found.append((share, number, result))
        if share <= QUIET_SHARE:
            break
        print(f"{what}: others took {share:.0%} of the CPUs", file=sys.stderr, flush=True)
    share, number, result = min(found, key=lambda each: each[:2])
    return result, round(share, 4), number


def send(target: Target, arrived_s: Sequence[float], num_users: int = 0) -> dict[str, Any]:
    """Requests at these times, or by so many users as fast as they are answered; none: what the idle server does.

    Each has a picture that was never seen, and an answer of exactly `OUTPUT_TOKENS`.
    """
    load = Load(target.url, "What is in the picture?", [(336, 336)], random.Random(next(_seeds)))
    load.options = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "min_tokens": OUTPUT_TOKENS}
    work = load.at_a_time(num_users, len(arrived_s)) if num_users else load.at_times([Arrival(at) for at in arrived_s])
    before_sums, began_s, before = target.sums(), time.monotonic(), processor_time()
    if arrived_s:
        asyncio.run(load.measured(work))
    else:
        work.close()
        time.sleep(IDLE_S)
    used, seconds = between(before, processor_time()), time.monotonic() - began_s
    time.sleep(1.0)  # metrics are up to half a second old
    after_sums = target.sums()
    return {
        "outcomes": [_told(outcome) for outcome in sorted(load.outcomes, key=lambda each: each.at_s)],
        "num_input_tokens": max([outcome.num_input_tokens for outcome in load.outcomes], default=0),
        "seconds": round(seconds, 3),
        "cpu": {name: round(value, 2) for name, value in used.items()},
        "sums": {name: round(value - before_sums.get(name, 0.0), 4) for name, value in after_sums.items()},
    }


def _told(outcome: Outcome) -> dict[str, Any]:
    return {
        "at_s": round(outcome.at_s, 5),
        "late_s": round(outcome.late_s, 5),
        "ttft_s": None if outcome.ttft_s is None else round(outcome.ttft_s, 5),
        "total_s": round(outcome.total_s, 5),
        "error": outcome.error,
    }


def arrivals(rate_per_s: float, seconds: float, times: int) -> list[float]:
    """Poisson arrivals for so many seconds, several times over, with pauses in which the queue empties."""
    chance, arrived_s, began_s = np.random.default_rng(3), list[float](), 0.0
    for _ in range(times):
        piece_s = began_s + poisson(int(rate_per_s * seconds), rate_per_s, chance)
        arrived_s += piece_s.tolist()
        began_s = arrived_s[-1] + BETWEEN_S
    return arrived_s


def capacity_of(run: dict[str, Any]) -> float:
    """Requests a second that a real closed loop ended."""
    return pace(np.sort([each["at_s"] + each["total_s"] for each in run["outcomes"]]))


def pace(ended_s: npt.NDArray[np.float64]) -> float:
    """Requests a second, from when they ended, in order; without the first and the last fifth of them."""
    first, last = len(ended_s) // 5, len(ended_s) * 4 // 5
    return float((last - first) / (ended_s[last] - ended_s[first]))


def record_run() -> dict[str, Any]:
    """Costs, and what the real server did with requests one by one, a closed loop, and each load."""
    plan = plan_of(PROFILE, None)
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    log_path = PROJECT_ROOT / "build" / "validation.log"
    log_path.parent.mkdir(exist_ok=True)
    with log_path.open("w") as log, running(plan, ("127.0.0.1", 0, 0, 0), os.environ, say, log) as server:
        url = f"127.0.0.1:{server.ports.grpc}"
        target = Target(url, f"http://127.0.0.1:{server.ports.metrics}/metrics")
        one_by_one = [index * PAUSE_S for index in range(NUM_ALONE)]

        def load(what: str, arrived_s: Sequence[float], num_users: int = 0) -> dict[str, Any]:
            result, share, number = quietly(lambda: send(target, arrived_s, num_users), what)
            return {**result, "others_share": share, "tries": number}

        profiler = Profiler(plan, read_facts(resolve(plan.checkpoint)), url)
        findings, others_share, _ = quietly(profiler.run, "costs")
        costs = costs_from(findings, plan, "measured on cpu_pools")
        send(target, one_by_one[:5])  # what only the first requests pay
        idle, alone = load("idle", []), load("alone", one_by_one)
        closed = load("closed", [0.0] * NUM_CLOSED, NUM_USERS)
        capacity, runs = capacity_of(closed), {}
        for name, (share, seconds, times) in LOADS.items():
            rate = capacity * share
            runs[name] = {"rate_per_s": round(rate, 3), **load(name, arrivals(rate, seconds, times))}
        again = load("closed again", [0.0] * NUM_CLOSED, NUM_USERS)
    told = {"capacity_per_s": capacity, "costs_others_share": others_share, "idle": idle, "alone": alone}
    return {**told, "closed": closed, "closed_again": again, "runs": runs, "costs": json.loads(to_json(costs))}
