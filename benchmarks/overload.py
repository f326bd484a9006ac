"""Four times more load than the server can take, for a minute; and deadlines while its decoders are busy.

    python -m benchmarks.overload --out benchmarks/results/overload.json

Goodput is requests per second whose first text came within --ttft-s. The peak is the best of closed loops of several
widths; every request has a picture of its own. The load comes from this process, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.provenance import provenance
from client import DeadlineExceeded, RelayClient
from client.load import Load
from client.load_plan import poisson
from launcher.serve import DEFAULT_PROFILE, plan_of, running

QUESTION = "What is in the picture?"
NUM_TOKENS = 32
WIDTHS = (8, 16, 32)
PEAK_S = 15.0
OVERLOAD_S = 60.0
DEADLINE_S = 0.3
MAX_WAIT_S = 1.0


def main() -> None:
    """Measures and prints; writes JSON with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ttft-s", type=float, default=2.5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    plan = plan_of(DEFAULT_PROFILE, None)
    plan = plan.model_copy(update={"limits": plan.limits.model_copy(update={"max_wait_s": MAX_WAIT_S})})
    with (
        Path("build/benchmark.log").open("w") as log,
        running(plan, ("127.0.0.1", 0, 0, 0), os.environ, lambda text: print(text, file=sys.stderr), log) as server,
    ):
        url = f"127.0.0.1:{server.ports.grpc}"
        figures = measure(url, arguments.ttft_s)
    print(json.dumps(figures, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps({**provenance(), **figures}, indent=2) + "\n")


def measure(url: str, ttft_s: float) -> dict[str, object]:
    """Peak, overload and deadlines."""
    closed_loop(url, 8, 40, ttft_s)  # warm
    peaks = {}
    rate = 8.0
    for width in WIDTHS:
        peaks[width] = closed_loop(url, width, max(40, int(PEAK_S * rate)), ttft_s)
        rate = max(rate, peaks[width])
    peak = max(peaks.values())
    load = new_load(url)
    times = list(poisson(4 * peak, int(4 * peak * OVERLOAD_S), random.Random(5)))
    seconds = asyncio.run(load.measured(load.at_times(times)))
    good = [each for each in load.outcomes if each.error is None and (each.ttft_s or 0.0) <= ttft_s]
    answered = [each.ttft_s for each in load.outcomes if each.error is None and each.ttft_s is not None]
    return {
        "ttft_limit_s": ttft_s,
        "max_wait_s": MAX_WAIT_S,
        "peak_goodput_per_s": {str(width): round(value, 2) for width, value in peaks.items()},
        "offered_per_s": round(4 * peak, 2),
        "num_offered": len(times),
        "outcomes": dict(Counter(each.error or "answered" for each in load.outcomes)),
        "goodput_per_s": round(len(good) / seconds, 2),
        "goodput_of_peak": round(len(good) / seconds / peak, 3),
        "ttft_of_answered_s": {
            "p50": round(statistics.median(answered), 3),
            "p90": round(statistics.quantiles(answered, n=10)[-1], 3),
            "max": round(max(answered), 3),
        },
        "deadline_300_ms": deadlines(url),
    }


def new_load(url: str) -> Load:
    """A load whose requests all are the same work."""
    load = Load(url, QUESTION, [(336, 336)], random.Random(3))
    load.options = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "ignore_eos": True}
    return load


def closed_loop(url: str, width: int, num_requests: int, ttft_s: float) -> float:
    """Goodput of `width` requests at a time."""
    load = new_load(url)
    seconds = asyncio.run(load.measured(load.at_a_time(width, num_requests)))
    return sum(each.error is None and (each.ttft_s or 0.0) <= ttft_s for each in load.outcomes) / seconds


def deadlines(url: str) -> dict[str, float]:
    """Seconds until the error of requests with a deadline of 300 ms, one after the other, behind 24 busy streams."""
    stopping = threading.Event()

    def busy() -> None:
        while not stopping.is_set():
            with client.stream(QUESTION, max_tokens=1500, ignore_eos=True) as stream:
                for _ in stream:
                    if stopping.is_set():
                        break

    times = []
    with RelayClient(url) as client, ThreadPoolExecutor(24) as pool:
        for _ in range(24):
            pool.submit(busy)
        time.sleep(3)
        for _ in range(30):
            began = time.monotonic()
            try:
                client.ask(QUESTION, max_tokens=1500, ignore_eos=True, deadline_s=DEADLINE_S)
            except DeadlineExceeded:
                times.append(time.monotonic() - began)
        stopping.set()
    return {
        "num": len(times),
        "p50_s": round(statistics.median(times), 4),
        "p90_s": round(statistics.quantiles(times, n=10)[-1], 4),
        "max_s": round(max(times), 4),
    }


if __name__ == "__main__":
    main()
