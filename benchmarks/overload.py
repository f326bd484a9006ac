"""Four times more load than the server can take, for a minute; and deadlines while its decoders are busy.

    python -m benchmarks.overload --out benchmarks/results/overload.json

Goodput is requests per second whose first text came within 2.5 s of their arrival, by the server's own histogram: this
process is as busy as the server, and its clock adds how late it is itself. The peak is the best of closed loops of
several widths; requests are text, so that what this process does costs little beside what it asks for.
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
from benchmarks.server_metrics import read_samples
from client import DeadlineExceeded, RelayClient
from client.load import Load
from client.load_plan import poisson
from launcher.serve import DEFAULT_PROFILE, plan_of, running
from scheduler.output_file import output_file

QUESTION = "Count from one to twenty."
NUM_TOKENS = 64
WIDTHS = (8, 16, 32)
PEAK_S = 15.0
OVERLOAD_S = 60.0
DEADLINE_S = 0.3
TTFT_S = 2.5  # a bucket of the server's histogram
MAX_WAIT_S = 1.0


def main() -> None:
    """Measures and prints; writes JSON with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_file)
    arguments = parser.parse_args()
    plan = plan_of(DEFAULT_PROFILE, None)
    plan = plan.model_copy(update={"limits": plan.limits.model_copy(update={"max_wait_s": MAX_WAIT_S})})
    with (
        Path("build/benchmark.log").open("w") as log,
        running(plan, ("127.0.0.1", 0, 0, 0), os.environ, lambda text: print(text, file=sys.stderr), log) as server,
    ):
        figures = measure(f"127.0.0.1:{server.ports.grpc}", f"http://127.0.0.1:{server.ports.metrics}/metrics")
    print(json.dumps(figures, indent=2))
    if arguments.out:
        told = provenance("benchmarks.overload", sys.argv[1:], ("python_backend", "scheduler"))
        arguments.out.write_text(json.dumps({**told, **figures}, indent=2) + "\n")


def measure(url: str, metrics_url: str) -> dict[str, object]:
    """Peak, overload and deadlines."""
    closed_loop(url, metrics_url, 8, 40)  # warm
    peaks = {}
    rate = 8.0
    for width in WIDTHS:
        peaks[width] = closed_loop(url, metrics_url, width, max(40, int(PEAK_S * rate)))
        rate = max(rate, peaks[width])
    peak = max(peaks.values())
    load = new_load(url)
    times = list(poisson(4 * peak, int(4 * peak * OVERLOAD_S), random.Random(5)))
    before = num_in_time(metrics_url)
    seconds = asyncio.run(load.measured(load.at_times(times)))
    num_good = num_in_time(metrics_url) - before
    answered = [each.ttft_s for each in load.outcomes if each.error is None and each.ttft_s is not None]
    return {
        "ttft_limit_s": TTFT_S,
        "max_wait_s": MAX_WAIT_S,
        "peak_goodput_per_s": {str(width): round(value, 2) for width, value in peaks.items()},
        "offered_per_s": round(4 * peak, 2),
        "num_offered": len(times),
        "outcomes": dict(Counter(each.error or "answered" for each in load.outcomes)),
        "goodput_per_s": round(num_good / seconds, 2),
        "goodput_of_peak": round(num_good / seconds / peak, 3),
        "ttft_by_this_process_s": {
            "p50": round(statistics.median(answered), 3),
            "p90": round(statistics.quantiles(answered, n=10)[-1], 3),
            "max": round(max(answered), 3),
        },
        "deadline_300_ms": deadlines(url),
    }


def new_load(url: str) -> Load:
    """A load whose requests all are the same work."""
    load = Load(url, QUESTION, [], random.Random(3))
    load.options = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "ignore_eos": True}
    return load


def closed_loop(url: str, metrics_url: str, width: int, num_requests: int) -> float:
    """Goodput of `width` requests at a time."""
    load, before = new_load(url), num_in_time(metrics_url)
    seconds = asyncio.run(load.measured(load.at_a_time(width, num_requests)))
    return (num_in_time(metrics_url) - before) / seconds


def num_in_time(metrics_url: str) -> float:
    """First texts within the limit so far, as the server counts them."""
    time.sleep(0.6)  # the metrics are up to half a second old
    buckets = [each for each in read_samples(metrics_url) if each.name == "vlm_relay_ttft_seconds_bucket"]
    return sum(each.value for each in buckets if float(each.labels["le"]) == TTFT_S)


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
