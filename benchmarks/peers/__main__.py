"""Decoder against decoder: this engine, vLLM's CPU build and OpenVINO GenAI on one checkpoint, in turns.

    python -m benchmarks.peers --geometry small --concurrent 1 4 16 --tokens 64 --openvino

Image features go in (a picture with OpenVINO GenAI, which takes no features; its encoder is tiny). Requests arrive
together; `step` is the median time between tokens while all decode, `first` the time to the first token of any, `total`
until all have ended. A side that does not run is stopped (SIGSTOP), so that none of its threads spins. The peers'
environments: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.arguments import at_least_one
from benchmarks.peers import RESULTS, python_of
from benchmarks.peers.checkpoint import write_for_peers
from benchmarks.provenance import provenance
from python_backend.checkpoint import PROJECT_ROOT

MEASURED = ("python_backend/decoder", "python_backend/weights.py", "benchmarks/peers")
PEERS = ("vllm", "openvino")


class Side:
    """A worker process, stopped unless it is asked."""

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=PROJECT_ROOT
            )
        self._log = log
        self._read("READY")
        self._process.send_signal(signal.SIGSTOP)

    def round(self, num_requests: int, num_tokens: int) -> dict[str, float]:
        """The times of one round."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(f"{num_requests} {num_tokens}\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._read("{"))
        self._process.send_signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def _read(self, beginning: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line
        raise SystemExit(f"a worker ended: {self._log.read_text()[-2000:]}")


def main() -> None:
    """Run all sides and write one JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=("small", "medium"), default="small")
    parser.add_argument("--threads", type=at_least_one, default=2)
    parser.add_argument("--concurrent", type=at_least_one, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=at_least_one, nargs="+", default=[64])
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument(
        "--step-tokens", type=at_least_one, default=2048, help="prompt and decode tokens of a step, both sides"
    )
    parser.add_argument("--int8", action="store_true", help="this engine with int8 weights, too")
    parser.add_argument("--openvino", action="store_true", help="OpenVINO GenAI, too")
    arguments = parser.parse_args()
    for peer in PEERS if arguments.openvino else ("vllm",):
        python_of(peer)  # not after the checkpoint that it is missing
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_for_peers(arguments.geometry, checkpoint)
        sides = start(arguments, checkpoint, Path(folder))
        rows = [
            compare(sides, num_requests, num_tokens, arguments.rounds)
            for num_tokens in arguments.tokens
            for num_requests in arguments.concurrent
        ]
        for side in sides.values():
            side.close()
    report = {"provenance": provenance("benchmarks.peers", sys.argv[1:], MEASURED), "rows": rows}
    lengths = "_".join(map(str, arguments.tokens))
    path = RESULTS / f"peers_{arguments.geometry}_{arguments.threads}t_{lengths}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def start(arguments: argparse.Namespace, checkpoint: Path, logs: Path) -> dict[str, Side]:
    """The sides, by name."""
    common = [str(checkpoint), str(arguments.threads), str(arguments.step_tokens)]
    own = [sys.executable, "-m", "benchmarks.peers.own_worker", *common]
    sides = {"own": Side([*own, "plain"], logs / "own.log")}
    if arguments.int8:
        sides["own_int8"] = Side([*own, "int8"], logs / "own_int8.log")
    worker = Path(__file__).with_name("vllm_worker.py")
    sides["vllm"] = Side([str(python_of("vllm")), str(worker), *common], logs / "vllm.log")
    if arguments.openvino:
        command = [str(python_of("openvino")), str(Path(__file__).with_name("openvino_worker.py"))]
        folder = export(checkpoint, logs / "openvino")
        sides["openvino"] = Side([*command, str(folder), *common[1:]], logs / "openvino.log")
    return sides


def export(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint as OpenVINO reads it."""
    command = [
        str(python_of("openvino").with_name("optimum-cli")),
        "export",
        "openvino",
        "--task",
        "image-text-to-text",
    ]
    command += ["--weight-format", "fp16", "--model", str(checkpoint), str(folder)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return folder


def compare(sides: dict[str, Side], num_requests: int, num_tokens: int, num_rounds: int) -> dict[str, object]:
    """One line of the table: the medians of each side, after a round to warm up."""
    for side in sides.values():
        side.round(num_requests, min(num_tokens, 8))
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, side in sides.items():
            rounds[name].append(side.round(num_requests, num_tokens))
    row: dict[str, object] = {"concurrent": num_requests, "tokens": num_tokens}
    for name, found in rounds.items():
        row[name] = {key: median(each[key] for each in found) for key in found[0]}
    for name, peer in itertools.product(rounds.keys() - PEERS, rounds.keys() & PEERS):
        for key in ("step_s", "first_s", "total_s"):
            pairs = [(own[key], theirs[key]) for own, theirs in zip(rounds[name], rounds[peer], strict=True)]
            if all(theirs for _, theirs in pairs):  # an answer of one token has no steps
                row[f"{name}_{key[:-2]}_over_{peer}"] = median(own / theirs for own, theirs in pairs)
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
