"""What the scheduler in front costs: token rate and time to first token through `llava` against `llava_decoder` alone.

`python -m benchmarks.relay_cost`: one server, text prompts, the two ways in turn (A B A B ...), medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tqdm import tqdm
from transformers import AutoTokenizer
from tritonclient.grpc import InferInput, service_pb2, service_pb2_grpc
from tritonclient.grpc._utils import _get_inference_request

from benchmarks.provenance import provenance
from launcher.serve import DEFAULT_PROFILE, plan_of, running
from scheduler.output_file import output_file

PROMPT = "USER: Count from one to twenty. ASSISTANT:"


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one way: tokens per second over all streams, and each stream's time to first token."""

    tokens_per_s: float
    ttft_s: list[float]


def request_to_llava(max_tokens: int) -> service_pb2.ModelInferRequest:
    """The prompt as a client sends it."""
    sampling = json.dumps({"max_tokens": max_tokens, "ignore_eos": True})
    return _request(
        "llava",
        [
            _bytes("text_input", PROMPT.encode()),
            _bytes("sampling_parameters", sampling.encode()),
            _array("stream", np.array([True]), "BOOL"),
            _array("return_num_output_tokens", np.array([True]), "BOOL"),
        ],
    )


def request_to_decoder(max_tokens: int, token_ids: list[int]) -> service_pb2.ModelInferRequest:
    """The same prompt as the scheduler sends it on."""
    sampling = json.dumps({"max_tokens": max_tokens, "ignore_eos": True})
    return _request(
        "llava_decoder",
        [
            _bytes("request_id", os.urandom(8).hex().encode()),
            _bytes("sampling_parameters", sampling.encode()),
            _array("token_ids", np.array(token_ids, np.int32), "INT32"),
        ],
    )


def run(address: str, num_streams: int, make: Callable[[], service_pb2.ModelInferRequest], count: str) -> Run:
    """All streams at once, to their end. `count` is the output that tells the tokens of a response."""
    ttft_s: list[float] = []
    num_tokens = [0]
    lock = threading.Lock()
    channel = grpc.insecure_channel(address)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    started = threading.Barrier(num_streams + 1)

    def stream(_: int) -> None:
        started.wait()
        began = time.perf_counter()
        first_s, tokens = None, 0
        for tokens_now in _responses(stub, make(), count):
            first_s = first_s or time.perf_counter() - began
            tokens += tokens_now
        with lock:
            ttft_s.append(first_s or 0.0)
            num_tokens[0] += tokens

    with ThreadPoolExecutor(num_streams) as pool:
        tasks = [pool.submit(stream, index) for index in range(num_streams)]
        started.wait()
        began = time.perf_counter()
        for task in tasks:
            task.result()
        elapsed_s = time.perf_counter() - began
    channel.close()
    return Run(num_tokens[0] / elapsed_s, ttft_s)


def _responses(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, request: service_pb2.ModelInferRequest, count: str
) -> Iterator[int]:
    for answer in stub.ModelStreamInfer(iter([request])):
        if answer.error_message:
            raise RuntimeError(answer.error_message)
        response = answer.infer_response
        for place, output in enumerate(response.outputs):
            if output.name == count:
                raw = response.raw_output_contents[place]
                yield len(raw) // 4 if count == "token_ids" else int(np.frombuffer(raw, np.uint32)[0])


def _request(model: str, inputs: list[InferInput]) -> service_pb2.ModelInferRequest:
    return _get_inference_request(
        inputs=inputs,
        model_name=model,
        model_version="",
        request_id="",
        outputs=None,
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=None,
        parameters=None,
    )


def _bytes(name: str, value: bytes) -> InferInput:
    return _array(name, np.array([value], dtype=np.object_), "BYTES")


def _array(name: str, values: npt.NDArray[Any], datatype: str) -> InferInput:
    tensor = InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return tensor


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--out", type=output_file, default=Path("benchmarks/results/relay_cost.json"))
    arguments = parser.parse_args(argv)
    token_ids = AutoTokenizer.from_pretrained("demo/checkpoint").encode(PROMPT)
    figures: dict[str, object] = {}
    plan = plan_of(DEFAULT_PROFILE, None)
    with (
        Path(os.devnull).open("w") as log,
        running(plan, ("127.0.0.1", 0, 0, 0), os.environ, lambda text: print(text, file=sys.stderr), log) as server,
    ):
        address = f"127.0.0.1:{server.ports.grpc}"
        for streams in (1, 16):
            relayed: list[Run] = []
            direct: list[Run] = []
            for round_ in tqdm(range(arguments.rounds + 1), desc=f"{streams} streams", file=sys.stderr):
                one = run(address, streams, lambda: request_to_llava(arguments.tokens), "num_output_tokens")
                other = run(address, streams, lambda: request_to_decoder(arguments.tokens, token_ids), "token_ids")
                if round_:  # the first warms up
                    relayed.append(one)
                    direct.append(other)
            figures[f"{streams} streams"] = _compare(relayed, direct)
    result = {**provenance("benchmarks.relay_cost", sys.argv[1:]), "tokens": arguments.tokens, "figures": figures}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    return 0


def _compare(relayed: list[Run], direct: list[Run]) -> dict[str, float]:
    def rate(runs: list[Run]) -> float:
        return statistics.median(run.tokens_per_s for run in runs)

    def ttft_ms(runs: list[Run]) -> float:
        return 1000 * statistics.median(value for run in runs for value in run.ttft_s)

    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(relayed, direct, strict=True)]
    return {
        "relayed_tokens_per_s": round(rate(relayed), 1),
        "direct_tokens_per_s": round(rate(direct), 1),
        "rate_ratio": round(statistics.median(ratios), 3),
        "relayed_ttft_ms": round(ttft_ms(relayed), 2),
        "direct_ttft_ms": round(ttft_ms(direct), 2),
        "added_ttft_ms": round(ttft_ms(relayed) - ttft_ms(direct), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
