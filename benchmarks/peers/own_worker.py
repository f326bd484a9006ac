"""This project's engine, told on its standard input what to run: run by `benchmarks.peers`."""

from __future__ import annotations

import json
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks.decoder_step import IMAGE_TOKEN, IMAGE_TOKENS, PROMPT_TOKENS
from python_backend.decoder.engine import DecodeRequest, Delta, Engine, EngineOptions, ImageEmbedding
from python_backend.request import SamplingParameters


def run(engine: Engine, num_requests: int, num_tokens: int, width: int, first_serial: int) -> dict[str, float]:
    """Answers requests that arrive together."""
    counts, stamps_s, ended = [0] * num_requests, [], threading.Event()
    firsts_s: list[float] = []

    def receive(index: int, delta: Delta) -> None:
        now_s = time.perf_counter()
        if not firsts_s:
            firsts_s.append(now_s)
        counts[index] += len(delta.token_ids)
        if index == num_requests - 1 and min(counts):
            stamps_s.append(now_s)
        if min(counts) == num_tokens:
            ended.set()

    ids = (1, IMAGE_TOKEN, *range(10, 10 + PROMPT_TOKENS - IMAGE_TOKENS - 1))
    sampling = SamplingParameters(max_tokens=num_tokens, ignore_eos=True)
    names = [str(first_serial + index) for index in range(num_requests)]
    images = [ImageEmbedding(name.encode(), torch.randn(IMAGE_TOKENS, width)) for name in names]
    start_s = time.perf_counter()
    for index, (name, image) in enumerate(zip(names, images, strict=True)):
        engine.submit(
            DecodeRequest(name, ids, (image,), sampling),
            lambda delta, index=index: receive(index, delta),  # type: ignore[misc]
        )
    ended.wait()
    steps_s = [after - before for before, after in pairwise(stamps_s)]
    return {
        "step_s": median(steps_s) if steps_s else 0.0,
        "first_s": firsts_s[0] - start_s,
        "total_s": time.perf_counter() - start_s,
    }


def main() -> None:
    """Serves rounds until the input ends."""
    checkpoint, threads, step_tokens, weights = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(threads)
    options = EngineOptions(
        dtype="bfloat16",
        weights=weights,
        num_threads=threads,
        kv_cache_bytes=2**31,
        max_sequences=16,
        max_step_tokens=step_tokens,
        prefix_cache=False,
    )
    engine = Engine.load(checkpoint, options, time.monotonic)
    engine.start()
    width = engine._runner.config.width
    print("READY", flush=True)
    serial = 0
    for line in sys.stdin:
        num_requests, num_tokens = map(int, line.split())
        print(json.dumps(run(engine, num_requests, num_tokens, width, serial)), flush=True)
        serial += num_requests
    engine.close()


if __name__ == "__main__":
    main()
