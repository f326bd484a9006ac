"""OpenVINO GenAI, told on its standard input what to run: run by `benchmarks.peers` with OpenVINO's own Python.

It takes pictures, not their features: each request brings one of random bytes, whose vision encoder, of two narrow
layers, is small beside the prompt; its prompt is a few tokens shorter. A line is "REQUESTS TOKENS"; the answer is a
line of JSON. Arguments: the folder of the exported model, threads, tokens of a step.
"""

import json
import sys
import time
from itertools import pairwise

import numpy as np
import openvino
import openvino_genai

PROMPT = "What is in the picture? Say it in a word."
SIDE = 336


def start(folder: str, threads: int, step_tokens: int) -> openvino_genai.ContinuousBatchingPipeline:
    """The pipeline, with prompts not cached."""
    config = openvino_genai.SchedulerConfig()
    config.cache_size = 2
    config.max_num_seqs = 16
    config.max_num_batched_tokens = step_tokens
    config.enable_prefix_caching = False
    config.dynamic_split_fuse = True
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
        "PERFORMANCE_HINT": "LATENCY",
    }
    return openvino_genai.ContinuousBatchingPipeline(folder, config, "CPU", properties)


def run(
    pipeline: openvino_genai.ContinuousBatchingPipeline, num_requests: int, num_tokens: int, first_serial: int
) -> dict[str, float]:
    """Answers requests that arrive together."""
    sampling = openvino_genai.GenerationConfig()
    sampling.max_new_tokens, sampling.ignore_eos, sampling.do_sample = num_tokens, True, False
    random = np.random.default_rng(first_serial)
    pictures = [random.integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8) for _ in range(num_requests)]
    start_s = time.perf_counter()
    handles = [
        pipeline.add_request(first_serial + index, PROMPT, [openvino.Tensor(picture)], sampling)
        for index, picture in enumerate(pictures)
    ]
    counts = [0] * num_requests
    first_s = 0.0
    stamps_s: list[float] = []
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now_s = time.perf_counter()
        given = 0
        for index, handle in enumerate(handles):
            while handle.can_read():
                tokens = sum(len(output.generated_ids) for output in handle.read().values())
                counts[index] += tokens
                given += tokens > 0
        if given and not first_s:
            first_s = now_s - start_s
        if given == num_requests:
            stamps_s.append(now_s)
    total_s = time.perf_counter() - start_s
    assert set(counts) == {num_tokens}, counts
    steps_s = sorted(after - before for before, after in pairwise(stamps_s))
    return {"step_s": steps_s[len(steps_s) // 2] if steps_s else 0.0, "first_s": first_s, "total_s": total_s}


def main() -> None:
    """Serves rounds until the input ends."""
    pipeline = start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print("READY", flush=True)
    serial = 0
    for line in sys.stdin:
        num_requests, num_tokens = map(int, line.split())
        print(json.dumps(run(pipeline, num_requests, num_tokens, serial)), flush=True)
        serial += num_requests


if __name__ == "__main__":
    main()
