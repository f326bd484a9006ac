"""What an event costs: the simulator's own agenda against simpy, on the same queue of customers.

`python -m benchmarks.event_core` needs simpy, which is not among the project's dependencies (`pip install
simpy==4.1.1`, best in an environment of its own). Customers arrive at random at a counter of several clerks, wait
their turn, are served, and leave; in simpy each is a process, here each is a few callbacks. Both are given the same
times and must find the same waits; of several runs the fastest counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.provenance import provenance
from scheduler.output_file import output_file
from scheduler.simulate.agenda import Agenda

RESULTS = Path(__file__).parent / "results"
NUM_CLERKS = 8
LOAD = 0.9
NUM_RUNS = 3

Times = list[tuple[float, float]]
"""When each customer comes, and how long it is served."""


def customers(count: int) -> Times:
    """Poisson arrivals, exponential service of one second on average."""
    chance = np.random.default_rng(1)
    came_s = np.cumsum(chance.exponential(1 / (NUM_CLERKS * LOAD), count))
    return list(zip(came_s.tolist(), chance.exponential(1.0, count).tolist(), strict=True))


def with_simpy(times: Times) -> float:
    """The seconds that all waited together."""
    import simpy  # type: ignore[import-not-found,import-untyped,unused-ignore]

    world = simpy.Environment()
    counter = simpy.Resource(world, NUM_CLERKS)
    waited = [0.0]

    def customer(served_s: float) -> Iterator[Any]:
        came_s = world.now
        with counter.request() as turn:
            yield turn
            waited[0] += world.now - came_s
            yield world.timeout(served_s)

    def source() -> Iterator[Any]:
        for came_s, served_s in times:
            yield world.timeout(came_s - world.now)
            world.process(customer(served_s))

    world.process(source())
    world.run()
    return waited[0]


def with_agenda(times: Times) -> float:
    """The same, as callbacks at times."""
    agenda = Agenda()
    waiting: deque[tuple[float, float]] = deque()
    waited, num_free = 0.0, NUM_CLERKS

    def begin(came_s: float, served_s: float) -> None:
        nonlocal waited, num_free
        num_free -= 1
        waited += agenda.now_s - came_s
        agenda.at(agenda.now_s + served_s, leave)

    def leave(_: object) -> None:
        nonlocal num_free
        num_free += 1
        if waiting:
            begin(*waiting.popleft())

    for came_s, served_s in times:
        agenda.run_until(came_s)
        if num_free:
            begin(came_s, served_s)
        else:
            waiting.append((came_s, served_s))
    while agenda.next_s() is not None:
        agenda.step()
    return waited


def measure(serve: Callable[[Times], float], times: Times) -> tuple[float, float]:
    """Microseconds of CPU per customer, the fewest of several runs; and the seconds waited."""
    fewest, waited_s = float("inf"), 0.0
    for _ in range(NUM_RUNS):
        gc.collect()
        began_s = process_time()
        waited_s = serve(times)
        fewest = min(fewest, process_time() - began_s)
    return fewest / len(times) * 1e6, waited_s


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; 1 when the two do not find the same."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.event_core", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--customers", type=at_least_one, default=200_000, help="(%(default)s)")
    parser.add_argument("--out", type=output_file, default=RESULTS / "event_core.json", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if find_spec("simpy") is None:
        parser.error("simpy is missing: pip install simpy==4.1.1")
    times = customers(arguments.customers)
    own_us, own_waited_s = measure(with_agenda, times)
    simpy_us, simpy_waited_s = measure(with_simpy, times)
    is_same = abs(own_waited_s - simpy_waited_s) <= 1e-6 * own_waited_s
    print(f"per customer: agenda {own_us:.2f} us, simpy {simpy_us:.2f} us, {simpy_us / own_us:.1f} times")
    report = provenance("benchmarks.event_core", argv, ("scheduler/simulate/agenda.py", "benchmarks/event_core.py"))
    told = {"simpy": version("simpy"), "customers": len(times), "agenda_us": own_us, "simpy_us": simpy_us}
    arguments.out.write_text(
        json.dumps({**report, **told, "times": simpy_us / own_us, "is_same": is_same}, indent=2) + "\n"
    )
    print("the same waits" if is_same else f"NOT HELD: {own_waited_s} s waited against {simpy_waited_s}")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
