"""What a decision costs: microseconds per request, by devices and images.

`python -m benchmarks.decide` decides for machines of 8 GPUs (4 encode, 4 decode, NVLink within, a slow link between)
under three kinds of load:

    idle   nobody has anything to do: all placements tie
    mixed  random loads
    far    the encoders near to idle decoders are busy, so that the bound of every decoder is below its price

Of each decision the least time of several repeats counts, since other processes only add to it; then the mean over
the decisions.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from time import perf_counter

from tqdm import tqdm

from benchmarks.provenance import provenance
from scheduler.loads import Load, Loads, RequestShape
from scheduler.plan import Device, Link, Plan, Replica
from scheduler.profile import DecodeTable, EncodeTable, LimitsTable
from scheduler.routing import Router

RESULTS = Path(__file__).parent / "results"
SIZES = (2, 8, 64, 256)
IMAGES = (0, 1, 4)
KINDS = ("idle", "mixed", "far")
PER_MACHINE = 8
LIMIT_US = 50.0
LIMIT_DEVICES = 64
NUM_DECISIONS = 24
MODEL = "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True, slots=True)
class Row:
    """One size, kind of load and number of images."""

    num_devices: int
    load: str
    num_images: int
    mean_us: float
    slowest_us: float


def plan_of(num_devices: int) -> Plan:
    """Half of the devices encode, half decode, on every machine."""
    half = min(PER_MACHINE, num_devices) // 2
    names = [f"cuda:{index}" for index in range(num_devices)]
    encodes = [index % (2 * half) < half for index in range(num_devices)]
    encoders = [name for name, encode in zip(names, encodes, strict=True) if encode]
    decoders = [name for name, encode in zip(names, encodes, strict=True) if not encode]
    return Plan(
        checkpoint="checkpoint",
        artifacts="build",
        encoders=tuple(Replica(name=f"clip_encoder_{n}", device=name) for n, name in enumerate(encoders)),
        decoders=tuple(Replica(name=f"llava_decoder_{n}", device=name) for n, name in enumerate(decoders)),
        encode=EncodeTable(),
        decode=DecodeTable(),
        limits=LimitsTable(),
        devices=tuple(
            Device(name=name, roles=("encode",) if encode else ("decode",), model=MODEL)
            for name, encode in zip(names, encodes, strict=True)
        ),
        links=tuple(_link(first, second) for first, second in combinations(range(num_devices), 2)),
    )


def _link(first: int, second: int) -> Link:
    is_near = first // PER_MACHINE == second // PER_MACHINE
    return Link(
        first=f"cuda:{first}",
        second=f"cuda:{second}",
        link="NV18" if is_near else "SYS",
        gigabytes_per_s=450.0 if is_near else 10.0,
        path="nvlink" if is_near else "socket",
    )


def loads_of(kind: str, plan: Plan, chance: random.Random) -> Loads:
    """Loads of one kind."""
    encoders = {each.name: Load(free_slots=64) for each in plan.encoders}
    decoders = {each.name: Load() for each in plan.decoders}
    if kind == "mixed":
        for load in encoders.values():
            load.pending_images = chance.randrange(8)
        for load in decoders.values():
            load.running = chance.randrange(30)
            load.pending_tokens = load.running * chance.randrange(300, 900)
    if kind == "far":
        idle = {f"clip_encoder_{index}" for index in range(4)}
        for name, load in encoders.items():
            load.pending_images = 0 if name in idle else 1
        for name in list(decoders)[:4]:
            decoders[name].running, decoders[name].pending_tokens = 20, 12_000
    return Loads(encoders, decoders)


def measure(num_devices: int, kind: str, num_images: int, num_repeats: int) -> Row:
    """Time of `Router.decide`."""
    plan, chance = plan_of(num_devices), random.Random(num_devices)
    router = Router(plan)
    shape = RequestShape(num_images, 64 + 576 * num_images, 128)
    cases = [loads_of(kind, plan, chance) for _ in range(NUM_DECISIONS)]
    least = [float("inf")] * len(cases)
    for _ in range(num_repeats):
        for index, loads in enumerate(cases):
            began = perf_counter()
            router.decide(shape, loads)
            least[index] = min(least[index], perf_counter() - began)
    return Row(num_devices, kind, num_images, round(sum(least) / len(least) * 1e6, 1), round(max(least) * 1e6, 1))


def verdict(rows: Sequence[Row]) -> list[str]:
    """What does not hold: at most 50 us at 64 devices, and no worse than linear beyond."""
    faults = [
        f"{row.mean_us} us at {row.num_devices} devices ({row.load}, {row.num_images} images), allowed: {LIMIT_US:g}"
        for row in rows
        if row.num_devices == LIMIT_DEVICES and row.mean_us > LIMIT_US
    ]
    by_case = {(row.num_devices, row.load, row.num_images): row.mean_us for row in rows}
    for (size, kind, images), mean_us in by_case.items():
        before = by_case.get((LIMIT_DEVICES, kind, images))
        if before is not None and size > LIMIT_DEVICES and mean_us > before * size / LIMIT_DEVICES:
            growth = f"{mean_us / before:.1f} times {LIMIT_DEVICES}, allowed: {size / LIMIT_DEVICES:g}"
            faults.append(f"{size} devices ({kind}, {images} images) take {growth}")
    return faults


def table(rows: Sequence[Row]) -> str:
    """Mean microseconds, a row per size and load, a column per number of images."""
    found = {(row.num_devices, row.load, row.num_images): row for row in rows}
    lines = [f"{'devices':>7}  {'load':<5}  " + "  ".join(f"{images} images" for images in IMAGES)]
    for size, kind in dict.fromkeys((row.num_devices, row.load) for row in rows):
        cells = "  ".join(f"{found[size, kind, images].mean_us:8.1f}" for images in IMAGES)
        lines.append(f"{size:>7}  {kind:<5}  {cells}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; 1 when a promise is broken."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decide", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30, help="per decision; the least time counts (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "decide.json", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    cases = [(size, kind, images) for size in SIZES for kind in KINDS for images in IMAGES]
    rows = [
        measure(size, kind, images, arguments.repeats)
        for size, kind, images in tqdm(cases, desc="deciding", unit="case", leave=False)
    ]
    faults = verdict(rows)
    report = {
        **provenance("benchmarks.decide", argv, ("scheduler", "benchmarks/decide.py")),
        "unit": "us",
        "rows": [asdict(row) for row in rows],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**report, "faults": faults}, indent=2) + "\n")
    machine = report["machine"]
    print(f"microseconds per decision, commit {report['commit']}, {machine}")
    print(table(rows))
    print("\n".join(f"NOT HELD: {fault}" for fault in faults) or f"held: under {LIMIT_US:g} us at 64, linear beyond")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
