"""`vlm-relay advise`: whether to give the encoder GPUs of its own, for a machine, a workload and limits."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scheduler.advise.advice import advise, vary_encode, vary_images
from scheduler.advise.goodput import MakeWorkload, Question
from scheduler.advise.report import helm_values, profile_toml, text, to_dict
from scheduler.cost import Costs, CostsRefused
from scheduler.deployment import read_topology_file
from scheduler.fleet import LINKS, FleetRefused, describe_machine
from scheduler.output_file import output_file, output_file_or_dash
from scheduler.roofline import peak, roofline
from scheduler.simulate.__main__ import REFUSALS, add_limits, add_workload, costs_from, limits_from, mix_from
from scheduler.simulate.azure import azure
from scheduler.simulate.trace import read_trace
from scheduler.simulate.workload import Mix, Workload, WorkloadRefused, bursts, poisson
from scheduler.topology import Topology

OK, REFUSED = 0, 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `advise`."""
    group = parser.add_argument_group("machine")
    group.add_argument("--gpus", type=int, default=4, help="how many (%(default)s)")
    group.add_argument("--gpu", default="A100-SXM4-80GB", help="what they are (%(default)s)")
    group.add_argument("--link", choices=LINKS, default="nvlink", help="what joins them (%(default)s)")
    group.add_argument("--topology", type=Path, metavar="FILE", help="recorded `nvidia-smi topo -m`, instead of these")
    group.add_argument("--costs", type=Path, metavar="FILE", help="measured costs; else rooflines of LLaVA-1.5-7B")
    group.add_argument("--encode-ms", type=float, metavar="MS", help="of one image, where it is not what costs say")
    group.add_argument("--in-flight", type=int, metavar="N", help="requests that a server takes at once (192)")
    add_workload(parser)
    add_limits(parser)
    group = parser.add_argument_group("search")
    group.add_argument("--seeds", type=int, default=3, help="workloads that each layout is tried with (%(default)s)")
    group.add_argument("--horizon", type=float, default=30.0, help="seconds that each try lasts (%(default)s)")
    group.add_argument("--quick", action="store_true", help="without asking when the answer would change")
    group = parser.add_argument_group("output")
    group.add_argument("--target", type=float, metavar="RATE", help="a load to size for: tells servers and Helm values")
    group.add_argument(
        "--json", type=output_file_or_dash, metavar="FILE", help="all of it as JSON; - prints it instead of the text"
    )
    group.add_argument("--out", type=output_file, metavar="TOML", help="where to write the profile")


def run(arguments: argparse.Namespace) -> int:
    """Searches and tells; the exit code."""
    try:
        return _run(arguments)
    except REFUSALS as error:
        print(f"advise: {error}", file=sys.stderr)
        return REFUSED


def _run(arguments: argparse.Namespace) -> int:
    topology, costs = machine_from(arguments), model_from(arguments)
    if arguments.seeds < 1 or not 0 < arguments.horizon < inf:
        raise ValueError(f"--seeds {arguments.seeds}, --horizon {arguments.horizon:g}; allowed: 1 or more, above 0")
    if arguments.target is not None and not 0 < arguments.target < inf:
        raise ValueError(f"--target {arguments.target:g}; allowed: above 0")
    if arguments.in_flight is not None and arguments.in_flight < 1:
        raise ValueError(f"--in-flight {arguments.in_flight}; allowed: 1 or more")
    make = maker_from(arguments)
    question = Question(make, limits_from(arguments), costs, arguments.horizon, arguments.in_flight)
    gc.disable()  # a simulation leaves no cycles behind
    with tqdm(desc="simulating", bar_format="{desc} [{elapsed}]", leave=False, disable=None) as bar:
        tell = _teller(bar)
        advice = advise(question, topology, costs, range(1, arguments.seeds + 1), tell)
        variations = []
        if not arguments.quick and topology.num_gpus > 1 and advice.shares.encode_s:
            variations = vary_encode(question, topology, costs, tell)
            if arguments.trace is None and not arguments.azure:
                by_images = [
                    (images, _maker(arguments, replace(mix_from(arguments), images=images))) for images in (1, 2, 4, 8)
                ]
                variations += vary_images(question, topology, costs, by_images, tell)
    if arguments.json == "-":
        print(json.dumps(to_dict(advice, question, topology, variations), indent=2))
    else:
        print(text(advice, question, topology, variations))
        if arguments.target is not None:
            found = peak(topology.gpus[0].name)
            print("\nHelm values (deploy/helm/vlm-relay):\n")
            print(helm_values(advice.chosen, topology, found.memory_gib if found else 80, arguments.target), end="")
    if arguments.json not in (None, "-"):
        Path(arguments.json).write_text(json.dumps(to_dict(advice, question, topology, variations), indent=2) + "\n")
    if arguments.out is not None:
        arguments.out.write_text(profile_toml(advice.chosen, topology))
    return OK


def _teller(bar: tqdm) -> Callable[[str], None]:  # type: ignore[type-arg,unused-ignore]
    def tell(what: str) -> None:
        bar.set_description_str(f"simulating {what}")

    return tell


def machine_from(arguments: argparse.Namespace) -> Topology:
    """The machine that was described, or recorded.

    Raises:
        FleetRefused, ProfileRefused: it cannot be.
    """
    if arguments.topology is None:
        return describe_machine(arguments.gpus, arguments.gpu, arguments.link)
    if peak(arguments.gpu) is None:
        describe_machine(1, arguments.gpu, "none")  # says which are known
    found = read_topology_file(arguments.topology, arguments.gpu)
    if found.num_gpus == 0:
        raise FleetRefused(f"topology {arguments.topology}: no GPU in it")
    return replace(found, source=f"{found.num_gpus} x {arguments.gpu}, {arguments.topology.name}")


def model_from(arguments: argparse.Namespace) -> Costs:
    """The costs of every GPU of the machine: measured, or by roofline.

    Raises:
        CostsRefused: they cannot be read, or are of several kinds of device.
    """
    given = costs_from(arguments.costs)
    if given is not None and len(given) > 1:
        raise CostsRefused(
            f"costs {arguments.costs}: of {len(given)} devices; allowed: one for all, advice is for equal GPUs"
        )
    costs = next(iter(given.values())) if given else roofline(arguments.gpu)
    if arguments.encode_ms is None:
        return costs
    if not 0 < arguments.encode_ms < inf:
        raise CostsRefused(f"--encode-ms {arguments.encode_ms:g}; allowed: above 0")
    encode = costs.encode.model_copy(update={"batch_s": 0.0, "image_s": arguments.encode_ms / 1000})
    return costs.model_copy(update={"encode": encode})


def maker_from(arguments: argparse.Namespace) -> MakeWorkload:
    """What draws the workload at any rate.

    Raises:
        WorkloadRefused: it makes no sense, or has no rate.
    """
    if arguments.arrivals not in ("poisson", "bursts"):
        raise WorkloadRefused(f"--arrivals {arguments.arrivals} has no rate to be searched; allowed: poisson, bursts")
    if arguments.trace is not None:
        trace = read_trace(arguments.trace)
        if not trace.rate_per_s > 0:
            raise WorkloadRefused(f"trace {arguments.trace}: all requests arrive at once; advice needs a rate")
        return lambda _, rate_per_s, __: trace.scaled(rate_per_s / trace.rate_per_s)
    return _maker(arguments, mix_from(arguments))


def _maker(arguments: argparse.Namespace, mix: Mix) -> MakeWorkload:
    arrive = bursts if arguments.arrivals == "bursts" else poisson

    def make(count: int, rate_per_s: float, seed: int) -> Workload:
        chance = np.random.default_rng(seed)
        arrived_s = arrive(count, rate_per_s, chance)
        return azure(arrived_s, chance) if arguments.azure else mix.draw(arrived_s, chance)

    return make


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scheduler.advise", description=__doc__)
    configure(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
