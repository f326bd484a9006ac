"""An image in the message against one in shared memory, on one server, in turn.

    VLM_RELAY_SHM_KEY=some-secret vlm-relay serve               # in another terminal
    VLM_RELAY_SHM_KEY=some-secret python -m benchmarks.image_transport [--url 127.0.0.1:8001] [--out FILE]

Each request carries one picture of the given file size and is answered with one token. The server has its embedding
already, and a JPEG with bytes behind its end is decoded as the small picture that it is: what differs is the way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

from benchmarks.provenance import provenance
from client import RelayClient, RelayClientError
from client.channel import DEFAULT_ADDRESS
from client.shared_memory import key_from
from scheduler.output_file import output_file

PICTURE = Path(__file__).resolve().parents[1] / "demo" / "picture.jpg"
QUESTION = "What is in the picture?"
SIZES_MIB = (0.25, 1.0, 4.0, 16.0)
MEASURED = ("client", "python_backend", "launcher")


def seconds(client: RelayClient, image: bytes) -> float:
    """How long one request takes."""
    began = time.perf_counter()
    client.ask(QUESTION, images=[image], max_tokens=1)
    return time.perf_counter() - began


def compare(message: RelayClient, memory: RelayClient, size_mib: float, rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and the ratio of each pair's."""
    picture = PICTURE.read_bytes()
    image = picture + random.Random(size_mib).randbytes(round(size_mib * 2**20) - len(picture))
    for client in (message, memory) * 3:
        seconds(client, image)
    pairs = [(seconds(message, image), seconds(memory, image)) for _ in range(rounds)]
    return {
        "image_mib": size_mib,
        "message_ms": statistics.median(first for first, _ in pairs) * 1000,
        "memory_ms": statistics.median(second for _, second in pairs) * 1000,
        "ratio": statistics.median(first / second for first, second in pairs),
    }


def main() -> None:
    """Measures and prints a table; writes it with `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_transport", description=__doc__)
    parser.add_argument("--url", default=DEFAULT_ADDRESS)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=output_file, help="also write the figures there, as JSON")
    arguments = parser.parse_args()
    facts = provenance("benchmarks.image_transport", sys.argv[1:], MEASURED)
    print("| image, MiB | in the message, ms | in shared memory, ms | ratio |\n| --- | --- | --- | --- |")
    rows = []
    with (
        RelayClient(arguments.url) as message,
        RelayClient(arguments.url, shared_memory_key=key_from(os.environ)) as memory,
    ):
        for size_mib in SIZES_MIB:
            row = compare(message, memory, size_mib, arguments.rounds)
            rows.append(row)
            figures = f"{row['message_ms']:.1f} | {row['memory_ms']:.1f} | {row['ratio']:.2f}"
            print(f"| {size_mib:g} | {figures} |", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({**facts, "sizes": rows}, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except RelayClientError as error:
        sys.exit(str(error))
