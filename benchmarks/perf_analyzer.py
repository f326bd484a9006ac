"""A running server, as its clients see it: `python -m benchmarks.perf_analyzer --url 127.0.0.1:8001`.

Runs Triton's perf_analyzer on the streamed `llava` model, or on the gateway (`--service-kind openai --url
http://127.0.0.1:9000`), and computes time to first text, latency and throughput from what it exports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.make_inputs import (
    INPUTS,
    PICTURE,
    QUESTIONS,
    distinct,
    openai_with_picture,
    with_picture,
    write_inputs,
)
from benchmarks.perf_binary import PerfAnalyzer, PerfAnalyzerMissing, find_perf_analyzer
from benchmarks.profile_export import ExportRefused, Level, read_levels, table
from benchmarks.provenance import provenance
from scheduler.output_file import output_file

BUILD = Path("build") / "perf_analyzer"
# More than the encoder's store holds: taken in turn, each has been evicted when its turn comes again.
NUM_DISTINCT = 96
MEASURED = ("python_backend", "launcher", "scheduler", "model_repository")
STABILITY_PERCENT = 999  # any: one window of requests is the measurement, not a search for stable ones
KINDS = {
    "triton": ("-i", "grpc", "--async", "--streaming"),
    # Without --streaming, which 2.46 allows with gRPC only and that not with this kind; an answer that streams because
    # its request says so is recorded chunk by chunk all the same.
    "openai": ("--service-kind", "openai", "--endpoint", "v1/chat/completions", "--async"),
}
INPUT_FILES = {"triton": INPUTS / "llava_stream.json", "openai": INPUTS / "openai_stream.json"}
TIMEOUT_S = 300.0  # it waits for ever when the server dies under it


class RunFailed(RuntimeError):
    """perf_analyzer did not complete; the message has its last words."""


def measure(
    analyzer: PerfAnalyzer,
    url: str,
    input_path: Path,
    num_requests: int,
    levels: str,
    export: Path,
    timeout_s: float = TIMEOUT_S,
    service_kind: str = "triton",
) -> list[Level]:
    """The figures of every level in `levels` (start, start:end or start:end:step requests in flight).

    Raises:
        RunFailed: perf_analyzer ended with an error, or requests failed.
    """
    export.parent.mkdir(parents=True, exist_ok=True)
    export.unlink(missing_ok=True)
    line = [str(analyzer.binary), "-m", "llava", "-u", url, *KINDS[service_kind]]
    line += ["--input-data", str(input_path), "--concurrency-range", levels]
    line += ["--measurement-mode", "count_windows", "--measurement-request-count", str(num_requests)]
    line += ["-s", str(STABILITY_PERCENT), "--profile-export-file", str(export)]
    try:
        done = subprocess.run(
            line, env=analyzer.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"perf_analyzer did not end in {timeout_s:g} s; does the server still run?") from error
    if done.returncode != 0:
        raise RunFailed(f"perf_analyzer: exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-1000:]}")
    try:
        figures = read_levels(export)
    except ExportRefused as error:
        raise RunFailed(str(error)) from error
    num_failed = sum(level.num_without_text for level in figures)
    if num_failed:
        raise RunFailed(f"{num_failed} requests were answered without text: {done.stderr.strip()[-500:]}")
    return figures


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perf_analyzer", description=__doc__)
    parser.add_argument("--service-kind", choices=sorted(KINDS), default="triton", help="(%(default)s)")
    parser.add_argument(
        "--url", default="127.0.0.1:8001", help="the server's gRPC address, or the gateway's http:// one (%(default)s)"
    )
    parser.add_argument("--input-data", type=Path, help="(that of the kind in benchmarks/inputs)")
    parser.add_argument(
        "--distinct-pictures", action="store_true", help="a new picture each time, so that each one is encoded"
    )
    parser.add_argument("--requests", type=int, default=100, help="per level, at least (%(default)s)")
    parser.add_argument(
        "--concurrency", default="1:4", metavar="START[:END[:STEP]]", help="requests in flight (%(default)s)"
    )
    parser.add_argument(
        "--export", type=output_file, default=BUILD / "profile.json", help="raw timestamps (%(default)s)"
    )
    parser.add_argument("--out", type=output_file, help="also write the figures there, as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes when asked to; 1 when that failed."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    input_path = arguments.input_data or INPUT_FILES[arguments.service_kind]
    if arguments.distinct_pictures:
        input_path = BUILD / "distinct_pictures.json"
        pictures = distinct(PICTURE.read_bytes(), NUM_DISTINCT)
        entry = with_picture if arguments.service_kind == "triton" else openai_with_picture
        write_inputs(input_path, [entry(QUESTIONS[0], picture) for picture in pictures])
    facts = provenance("benchmarks.perf_analyzer", argv, MEASURED)
    try:
        analyzer = find_perf_analyzer(os.environ)
        levels = measure(
            analyzer,
            arguments.url,
            input_path,
            arguments.requests,
            arguments.concurrency,
            arguments.export,
            service_kind=arguments.service_kind,
        )
    except (PerfAnalyzerMissing, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(levels))
    if arguments.out is not None:
        figures = {**facts, "levels": [level.to_dict() for level in levels]}
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
