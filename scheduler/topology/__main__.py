"""`python -m scheduler.topology [FILE]`."""

import argparse
import sys

from scheduler.topology.command import configure, run


def main() -> int:
    """Run the command with the arguments of the process."""
    parser = argparse.ArgumentParser(prog="python -m scheduler.topology", description="How the GPUs are linked.")
    configure(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
