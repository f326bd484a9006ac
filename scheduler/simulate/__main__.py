"""`vlm-relay simulate`: serve a workload on a simulated server of a profile, with the policy that serves."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scheduler.cost import Costs, CostsRefused, read_costs
from scheduler.deployment import read_deployment
from scheduler.fleet import FleetRefused
from scheduler.output_file import output_file, output_file_or_dash
from scheduler.placement import PlacementRefused
from scheduler.plan import Plan
from scheduler.pools import costs_of
from scheduler.profile import ProfileRefused
from scheduler.simulate.azure import azure, day
from scheduler.simulate.outcome import Figures, Limits, figures
from scheduler.simulate.picture import draw_curves, draw_timeline, picture_file
from scheduler.simulate.report import text, to_dict
from scheduler.simulate.run import Options, Outage, SimulationRefused
from scheduler.simulate.simulation import simulate
from scheduler.simulate.trace import read_trace
from scheduler.simulate.workload import Mix, Workload, WorkloadRefused, bursts, poisson, together

OK, REFUSED = 0, 2
MOST = 10**8  # requests, images, tokens; far above what can be simulated, far below what columns hold
KINDS = ("poisson", "bursts", "day", "closed")
REFUSALS = (
    *(CostsRefused, FleetRefused, PlacementRefused, ProfileRefused, SimulationRefused),
    WorkloadRefused,
    ValueError,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `simulate`."""
    parser.add_argument("profile", type=Path, help="a deployment profile, for example deploy/profiles/eight_gpu.toml")
    parser.add_argument("--topology", type=Path, metavar="FILE", help="recorded `nvidia-smi topo -m`, as for plan")
    parser.add_argument("--gpu-name", metavar="NAME", help="what the GPUs of a recorded topology are")
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="measured costs, from vlm-relay profile; else rooflines"
    )
    parser.add_argument("--policy", choices=("cost", "article", "serial", "split"), help="instead of the profile's")
    parser.add_argument("--in-flight", type=int, metavar="N", help="requests served at once, instead of the profile's")
    parser.add_argument(
        "--learn",
        action="store_true",
        help="the server is told no costs: it reckons with rooflines, and corrects them by what it sees",
    )
    parser.add_argument(
        "--outage",
        action="append",
        default=[],
        metavar="NAME:AT[:UNTIL]",
        help="a replica or device dies at AT seconds and is back at UNTIL; may be repeated",
    )
    add_workload(parser)
    add_limits(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        type=output_file_or_dash,
        metavar="FILE",
        help="all figures as JSON; - prints them instead of the tables",
    )
    group.add_argument(
        "--timeline", type=picture_file, metavar="PICTURE", help="what each replica did when (.png, .svg, .pdf)"
    )
    group.add_argument("--window", metavar="FROM:TO", help="seconds that the timeline shows (all)")
    group.add_argument(
        "--curves", type=picture_file, metavar="PICTURE", help="latency and goodput at 0.2 to 1.2 times the rate"
    )
    group.add_argument("--log", type=output_file, metavar="FILE", help="every event of every request, a line each")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what is asked, and when."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="CSV",
        help="a recorded workload (time_s, images, ...), or Azure's, instead of what follows",
    )
    group.add_argument("--arrivals", choices=KINDS, default="poisson", help="when requests come (%(default)s)")
    group.add_argument("--rate", type=float, default=10.0, help="requests per second at the mean (%(default)s)")
    group.add_argument("--requests", type=int, default=2000, help="how many (%(default)s)")
    group.add_argument("--users", type=int, default=8, help="of arrivals 'closed': they wait for answers (%(default)s)")
    group.add_argument("--think", type=float, default=0.0, help="seconds that a user waits in between (%(default)s)")
    group.add_argument("--azure", action="store_true", help="images and tokens as in Azure's multimodal trace")
    group.add_argument("--images", type=int, default=1, help="per request that has any (%(default)s)")
    group.add_argument("--image-share", type=float, default=1.0, help="of the requests that have any (%(default)s)")
    group.add_argument("--text-tokens", type=int, default=64, help="of a prompt beside images (%(default)s)")
    group.add_argument("--output-tokens", type=int, default=128, help="of an answer (%(default)s)")
    group.add_argument("--spread", type=float, default=0.0, help="of both, of their logarithm (%(default)s: all alike)")
    group.add_argument("--distinct", type=int, default=0, help="pictures that images are drawn from (0: all differ)")
    group.add_argument("--seed", type=int, default=1, help="one seed, one workload (%(default)s)")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what clients are promised."""
    group = parser.add_argument_group("limits")
    group.add_argument("--ttft", type=float, default=2.0, help="seconds to the first token (%(default)s)")
    group.add_argument(
        "--tpot", type=float, default=0.1, help="seconds per further token, mean of a request (%(default)s)"
    )
    group.add_argument("--attainment", type=float, default=0.9, help="share that must have both (%(default)s)")
    group.add_argument(
        "--warm-up", type=float, default=0.1, help="share of the requests that does not count (%(default)s)"
    )


def limits_from(arguments: argparse.Namespace) -> Limits:
    """The limits that were asked for.

    Raises:
        ValueError: one that makes no sense.
    """
    for name in ("ttft", "tpot"):
        if not 0 < getattr(arguments, name) < inf:
            raise ValueError(f"--{name} {getattr(arguments, name):g}; allowed: above 0")
    if not 0 < arguments.attainment <= 1:
        raise ValueError(f"--attainment {arguments.attainment:g}; allowed: above 0, at most 1")
    if not 0 <= arguments.warm_up < 1:
        raise ValueError(f"--warm-up {arguments.warm_up:g}; allowed: 0 or more, below 1")
    return Limits(arguments.ttft, arguments.tpot, arguments.attainment)


def mix_from(arguments: argparse.Namespace) -> Mix:
    """What each request of a generated workload is.

    Raises:
        WorkloadRefused: a value out of range.
    """
    for name, least in (("requests", 1), ("images", 0), ("text_tokens", 1), ("output_tokens", 1), ("users", 1)):
        if not least <= getattr(arguments, name) <= MOST:
            option = name.replace("_", "-")
            raise WorkloadRefused(f"--{option} {getattr(arguments, name)}; allowed: {least} to {MOST}")
    if not 0 <= arguments.image_share <= 1:
        raise WorkloadRefused(f"--image-share {arguments.image_share:g}; allowed: 0 to 1")
    for name in ("spread", "think", "distinct", "seed"):
        if not 0 <= getattr(arguments, name) < inf:
            raise WorkloadRefused(f"--{name} {getattr(arguments, name):g}; allowed: 0 or more")
    return Mix(
        images=arguments.images,
        image_share=arguments.image_share,
        text_tokens=arguments.text_tokens,
        output_tokens=arguments.output_tokens,
        spread=arguments.spread,
        num_distinct=arguments.distinct,
    )


def workload_from(arguments: argparse.Namespace) -> Workload:
    """The workload that was asked for.

    Raises:
        WorkloadRefused: it makes no sense.
    """
    if arguments.trace is not None:
        trace = read_trace(arguments.trace)
        _refuse_beside_trace(arguments)
        return trace
    mix, chance = mix_from(arguments), np.random.default_rng(arguments.seed)
    if arguments.arrivals == "closed":
        arrived_s = together(arguments.requests)
    else:
        arrive = {"poisson": poisson, "bursts": bursts, "day": day}[arguments.arrivals]
        poisson(1, arguments.rate, chance)  # refuses a rate that makes no sense
        arrived_s = arrive(arguments.requests, arguments.rate, chance)
    num_users = arguments.users if arguments.arrivals == "closed" else 0
    if arguments.azure:
        return replace(azure(arrived_s, chance), num_users=num_users, think_s=arguments.think)
    return mix.draw(arrived_s, chance, num_users, arguments.think)


def _refuse_beside_trace(arguments: argparse.Namespace) -> None:
    """What a trace says itself cannot be asked for: it would not be heeded."""
    parser = argparse.ArgumentParser()
    add_workload(parser)
    usual = vars(parser.parse_args([]))
    asked = [name for name in usual if name not in ("trace", "seed") and getattr(arguments, name) != usual[name]]
    if asked:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise WorkloadRefused(f"{options} beside --trace, which says itself what is asked and when; allowed: without")


def costs_from(path: Path | None) -> dict[str, Costs] | None:
    """Measured costs; None without a file.

    Raises:
        CostsRefused: they cannot be read.
    """
    return None if path is None else read_costs(path)


def run(arguments: argparse.Namespace) -> int:
    """Simulates and reports; the exit code."""
    try:
        return _run(arguments)
    except REFUSALS as error:
        print(f"simulate: {error}", file=sys.stderr)
        return REFUSED


def _run(arguments: argparse.Namespace) -> int:
    limits, workload, costs = limits_from(arguments), workload_from(arguments), costs_from(arguments.costs)
    if arguments.curves is not None and workload.num_users:
        raise WorkloadRefused("--curves needs arrivals at a rate; allowed: poisson, bursts, day, or a trace")
    window = _window(arguments.window)
    if arguments.in_flight is not None and arguments.in_flight < 1:
        raise SimulationRefused(f"--in-flight {arguments.in_flight}; allowed: 1 or more")
    plan = read_deployment(arguments.profile, arguments.topology, arguments.gpu_name)
    log: list[str] = []
    options = Options(
        policy=arguments.policy,
        max_in_flight=arguments.in_flight,
        believed=costs_of(plan, None) if arguments.learn else None,
        learns=arguments.learn,
        outages=[_outage(each) for each in arguments.outage],
        keeps_spans=arguments.timeline is not None,
        log=None if arguments.log is None else lambda *entry: log.append("{:.9f}\t{}\t{}\t{}\n".format(*entry)),
    )
    with tqdm(total=len(workload), desc="simulating", unit="request", leave=False, disable=None) as bar:
        done = simulate(plan, workload, costs, replace(options, progress=bar.update))
    told = to_dict(done, limits, arguments.warm_up)
    if arguments.json == "-":
        print(json.dumps(told, indent=2))
    else:
        print(text(done, limits, arguments.warm_up))
    if arguments.json not in (None, "-"):
        Path(arguments.json).write_text(json.dumps(told, indent=2) + "\n")
    if arguments.log is not None:
        arguments.log.write_text("".join(log))
    if arguments.timeline is not None:
        draw_timeline(done, arguments.timeline, *window)
    if arguments.curves is not None:
        points = sweep(plan, workload, costs, options, limits, arguments.warm_up)
        draw_curves({options.policy or plan.schedule.policy: points}, limits, arguments.curves)
    return OK


def sweep(
    plan: Plan,
    workload: Workload,
    costs: dict[str, Costs] | None,
    options: Options,
    limits: Limits,
    warm_up: float,
) -> list[tuple[float, Figures]]:
    """The figures at several rates of the same requests, which are no closed loop."""
    points = []
    for factor in tqdm([0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2], desc="rates", leave=False, disable=None):
        scaled = workload.scaled(factor)
        done = simulate(plan, scaled, costs, replace(options, keeps_spans=False, log=None))
        points.append((scaled.rate_per_s, figures(done.outcomes, limits, warm_up)))
    return points


def _outage(told: str) -> Outage:
    name, *times = (
        told.rsplit(":", 2) if told.count(":") >= 2 and _is_number(told.rsplit(":", 2)[1]) else told.rsplit(":", 1)
    )
    try:
        outage = Outage(name, *(float(each) for each in times))
    except (TypeError, ValueError):
        raise SimulationRefused(f"--outage {told!r}; allowed: NAME:AT or NAME:AT:UNTIL, in seconds") from None
    if not times or not 0 <= outage.at_s < outage.until_s:
        raise SimulationRefused(f"--outage {told!r}; allowed: AT of 0 or more, before UNTIL")
    return outage


def _is_number(told: str) -> bool:
    try:
        float(told)
    except ValueError:
        return False
    return True


def _window(told: str | None) -> tuple[float, float | None]:
    if told is None:
        return 0.0, None
    begin, _, end = told.partition(":")
    if not _is_number(begin) or not _is_number(end) or not float(begin) < float(end):
        raise SimulationRefused(f"--window {told!r}; allowed: FROM:TO, in seconds")
    return float(begin), float(end)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scheduler.simulate", description=__doc__)
    configure(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
