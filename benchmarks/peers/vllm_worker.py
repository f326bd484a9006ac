"""vLLM's CPU build, told on its standard input what to run: run by `benchmarks.peers` with vLLM's own Python.

Settings that were tried: both cores bound (`VLLM_CPU_OMP_THREADS_BIND`, the default takes one), the engine in this
process, prefixes not cached on either side. A line is "REQUESTS TOKENS"; the answer is a line of JSON.
"""

import json
import os
import sys
import time
from itertools import pairwise

THREADS = sys.argv[2]
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "0" if THREADS == "1" else f"0-{int(THREADS) - 1}",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

IMAGE_TOKEN, IMAGE_TOKENS, PROMPT_TOKENS = 3, 576, 597


def run(llm: LLM, num_requests: int, num_tokens: int, width: int, first_serial: int) -> dict[str, float]:
    """Answers requests that arrive together."""
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    ids = [1, IMAGE_TOKEN, *range(10, 10 + PROMPT_TOKENS - IMAGE_TOKENS - 1)]
    images = [torch.randn(1, IMAGE_TOKENS, width) for _ in range(num_requests)]
    start_s = time.perf_counter()
    for index, image in enumerate(images):
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": image}}
        engine.add_request(str(first_serial + index), prompt, sampling)
    first_s = 0.0
    counts: dict[str, int] = {}
    stamps_s: list[float] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now_s = time.perf_counter()
        if outputs and not counts:
            first_s = now_s - start_s
        for output in outputs:
            counts[output.request_id] = len(output.outputs[0].token_ids)
        if len(outputs) == len(counts) == num_requests:
            stamps_s.append(now_s)
    steps_s = sorted(after - before for before, after in pairwise(stamps_s))
    assert set(counts.values()) == {num_tokens}
    return {
        "step_s": steps_s[len(steps_s) // 2] if steps_s else 0.0,
        "first_s": first_s,
        "total_s": time.perf_counter() - start_s,
    }


def main() -> None:
    """Serves rounds until the input ends."""
    llm = LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_num_seqs=16,
        max_model_len=2048,
        max_num_batched_tokens=int(sys.argv[3]),
        limit_mm_per_prompt={"image": 1},
        enable_mm_embeds=True,
        enable_prefix_caching=False,
    )
    width = llm.llm_engine.model_config.hf_config.text_config.hidden_size
    print("READY", flush=True)
    serial = 0
    for line in sys.stdin:
        num_requests, num_tokens = map(int, line.split())
        print(json.dumps(run(llm, num_requests, num_tokens, width, serial)), flush=True)
        serial += num_requests


if __name__ == "__main__":
    main()
