"""`python -m scheduler render`: writes a profile into a model repository."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scheduler.placement import place
from scheduler.profile import ProfileRefused, read_profile
from scheduler.render import RenderRefused, write

ROOT = Path(__file__).resolve().parent.parent


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `render`."""
    parser.add_argument("profile", type=Path, help="a profile, for example deploy/profiles/cpu.toml")
    parser.add_argument(
        "--repository", type=Path, default=ROOT / "model_repository", help="where the contracts are (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="where to write (default: the repository itself)")


def run(arguments: argparse.Namespace) -> int:
    """Renders; the exit code."""
    try:
        plan = place(read_profile(arguments.profile))
        names = write(plan, arguments.repository, arguments.out or arguments.repository)
    except (ProfileRefused, RenderRefused) as error:
        print(f"render: {error}", file=sys.stderr)
        return 2
    print(f"rendered {', '.join(names)} into {arguments.out or arguments.repository}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scheduler", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("render", help="write a profile's placement into a model repository")
    configure(command)
    command.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
