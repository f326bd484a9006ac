"""What several benchmarks read from their command lines."""

from __future__ import annotations

import argparse


def at_least_one(told: str) -> int:
    """A number of things that there must be; a `type` of argparse."""
    if not told.isdecimal() or int(told) < 1:
        raise argparse.ArgumentTypeError(f"{told!r}; allowed: 1 or more")
    return int(told)
