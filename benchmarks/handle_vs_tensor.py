"""Passing an embedding from encoder to decoder by handle, against passing it as a tensor.

`python -m benchmarks.handle_vs_tensor` starts a server, measures both ways in turn and writes
`results/handle_vs_tensor.json` and `.png`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chain_client import BLOCK_CHAINS, ChainClient
from benchmarks.provenance import provenance
from benchmarks.summary import Growth, Report, Round, summarise
from benchmarks.triton_process import serving
from benchmarks.workload import EMBEDDING_BYTES, NUM_SLOTS, SHAPE, WAYS, WHOLE
from scheduler.output_file import output_file

MODELS = Path(__file__).parent / "models"
RESULTS = Path(__file__).parent / "results"
MEASURED = ("benchmarks/*.py", "benchmarks/models", "python_backend/transport")
WARM_UP_CHAINS = 50
GROWTH_CHAINS = 50
WHOLE_CHAINS = 10  # verified to the last byte
MIN_CHAINS = 20
WANTED_RATIO = 3.0
# What helps tensors: regions so large that none grows, and a heap that does not give its pages back to the
# system after each tensor, to have them zeroed again for the next.
REGION_BYTES = 64 << 20
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 28), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def measure(num_chains: int, num_rounds: int, log_path: Path) -> Report:
    """Rounds of both ways on one server, after a look at what each alone adds to /dev/shm on another."""
    growth = _measure_growth(log_path)
    with serving(MODELS, {"shm-default-byte-size": REGION_BYTES}, HEAP, log_path) as server:
        client = ChainClient(server)
        try:
            client.run(WARM_UP_CHAINS, WAYS, "warm-up")
            before = server.region_bytes()
            labels = [f"round {number} of {num_rounds}" for number in range(1, num_rounds + 1)]
            rounds = [Round.of(client.run(num_chains, WAYS, label)) for label in labels]
            grown_bytes = server.region_bytes() - before
            client.run(WHOLE_CHAINS, WAYS, "every byte", row=WHOLE)
        finally:
            client.close()
    return summarise(rounds, growth, grown_bytes)


def _measure_growth(log_path: Path) -> Growth:
    """With Triton's own settings; the handle's first, since regions never shrink."""
    with serving(MODELS, {}, {}, log_path) as server:
        client = ChainClient(server)
        try:
            sizes = [server.region_bytes()]
            for way in ("handle", "tensor"):
                client.run(GROWTH_CHAINS, (way,), f"growth, {way}")
                sizes.append(server.region_bytes())
            return Growth(
                handle_bytes=sizes[1] - sizes[0], tensor_bytes=sizes[2] - sizes[1], store_bytes=server.store_bytes()
            )
        finally:
            client.close()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handle_vs_tensor", description=__doc__)
    parser.add_argument("--chains", type=int, default=400, help="chains per way and round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the median one counts (%(default)s)")
    parser.add_argument("--out", type=output_file, default=RESULTS / "handle_vs_tensor.json", help="(%(default)s)")
    parser.add_argument(
        "--log", type=output_file, default=Path("build/benchmark.log"), help="server's log (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.chains < MIN_CHAINS or arguments.rounds < 1:
        parser.error(f"--chains must be {MIN_CHAINS} or more, --rounds 1 or more")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; 1 when passing a handle is not at least three times as fast."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    facts = provenance("benchmarks.handle_vs_tensor", argv, MEASURED)
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    report = measure(arguments.chains, arguments.rounds, arguments.log)
    print(report.table())
    setup = {
        "shape": SHAPE,
        "dtype": "float16",
        "embedding_bytes": EMBEDDING_BYTES,
        "store_slots": NUM_SLOTS,
        "chains_per_way_and_round": arguments.chains,
        "block_chains": BLOCK_CHAINS,
        "shm_default_byte_size": REGION_BYTES,
        "environment": HEAP,
    }
    arguments.out.write_text(json.dumps({**facts, "setup": setup, **report.to_dict()}, indent=2) + "\n")
    from benchmarks.plot import draw  # matplotlib: a second to import

    picture = arguments.out.with_suffix(".png")
    draw(report, facts, picture)
    print(f"written: {arguments.out}, {picture}")
    if report.ratio < WANTED_RATIO:
        print(f"handles pass only {report.ratio:.2f} times as fast, {WANTED_RATIO:g} wanted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
