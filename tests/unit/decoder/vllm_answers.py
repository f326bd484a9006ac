"""Answers of `VllmEngine`, as JSON: run by test_vllm.py with the Python of vLLM's environment."""

import json
import sys
import threading
import time
from pathlib import Path

import torch

from python_backend.decoder.options import EngineOptions
from python_backend.decoder.sequence import DecodeRequest, Delta, ImageEmbedding
from python_backend.decoder.vllm_engine import VllmEngine
from python_backend.errors import RelayError
from python_backend.request import SamplingParameters


def main() -> None:
    """Serve the requests of a file together, cancel the one called `cancelled`, print what each one got."""
    checkpoint, requests = Path(sys.argv[1]), torch.load(sys.argv[2])
    options = EngineOptions(dtype="float32", num_threads=2, max_sequences=8, context_tokens=512)
    engine = VllmEngine.load(checkpoint, options, time.monotonic)
    found: dict[str, list[Delta]] = {}
    left = threading.Semaphore(0)

    def receive(name: str, delta: Delta) -> None:
        found.setdefault(name, []).append(delta)
        if delta.is_final:
            left.release()
        elif name == "cancelled":
            engine.cancel(name)

    engine.start()
    refused = {}
    for name, (ids, features, values) in requests.items():
        images = tuple(ImageEmbedding(name.encode(), each) for each in features)
        request = DecodeRequest(name, tuple(ids), images, SamplingParameters(**values))
        try:
            engine.submit(request, lambda delta, name=name: receive(name, delta))
        except RelayError as error:
            refused[name] = str(error)
    for _ in range(len(requests) - len(refused)):
        left.acquire()
    engine.close()
    answers = {
        name: {
            "token_ids": [token for delta in deltas for token in delta.token_ids],
            "text": "".join(delta.text for delta in deltas),
            "finish_reason": deltas[-1].finish_reason,
            "error": str(deltas[-1].error) if deltas[-1].error else None,
            "logprobs": [round(each.logprob, 3) for delta in deltas for each in delta.logprobs],
        }
        for name, deltas in found.items()
    }
    print("ANSWERS " + json.dumps({"answers": answers, "refused": refused}), flush=True)


if __name__ == "__main__":
    main()
