"""`python -m scheduler plan` and `render`: where a profile puts its replicas, and the model repository for it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scheduler.deployment import read_deployment
from scheduler.engine import EngineConfigRefused
from scheduler.explain import explain, summary
from scheduler.placement import PlacementRefused
from scheduler.profile import ProfileRefused
from scheduler.render import RenderRefused, write

ROOT = Path(__file__).resolve().parent.parent
OK, REFUSED = 0, 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `render`."""
    _add_profile(parser)
    parser.add_argument(
        "--repository", type=Path, default=ROOT / "model_repository", help="where the contracts are (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="where to write (default: the repository itself)")


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `plan`."""
    _add_profile(parser)
    parser.add_argument("--explain", action="store_true", help="also the links, and why each device was chosen")
    parser.add_argument("--json", action="store_true", help="the plan as plan.json has it")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, help="a profile, for example deploy/profiles/cpu.toml")
    parser.add_argument(
        "--topology",
        type=Path,
        metavar="FILE",
        help="recorded output of `nvidia-smi topo -m`, instead of the profile's or this machine's",
    )
    parser.add_argument("--gpu-name", metavar="NAME", help="what the GPUs of a recorded topology are")


def run(arguments: argparse.Namespace) -> int:
    """Renders; the exit code."""
    try:
        plan = read_deployment(arguments.profile, arguments.topology, arguments.gpu_name)
        names = write(plan, arguments.repository, arguments.out or arguments.repository)
    except (ProfileRefused, PlacementRefused, RenderRefused, EngineConfigRefused) as error:
        print(f"render: {error}", file=sys.stderr)
        return REFUSED
    print(f"rendered {', '.join(names)} into {arguments.out or arguments.repository}")
    return OK


def run_plan(arguments: argparse.Namespace) -> int:
    """Prints the plan; the exit code."""
    try:
        plan = read_deployment(arguments.profile, arguments.topology, arguments.gpu_name)
    except (ProfileRefused, PlacementRefused) as error:
        print(f"plan: {error}", file=sys.stderr)
        return REFUSED
    if arguments.json:
        print(plan.to_json(), end="")
    else:
        print(explain(plan) if arguments.explain else summary(plan))
    return OK


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scheduler", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("plan", help="show where a profile's replicas go")
    configure_plan(command)
    command.set_defaults(run=run_plan)
    command = commands.add_parser("render", help="write a profile's placement into a model repository")
    configure(command)
    command.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
