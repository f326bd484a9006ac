"""What the gateway adds to the time to first token, beside direct gRPC, in one run.

    vlm-relay up                                      # in another terminal
    python -m benchmarks.gateway_ttft [--gateway http://127.0.0.1:9000] [--url 127.0.0.1:8001]

The two are asked in turn, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import time
from pathlib import Path

import httpx

from client import RelayClient, RelayClientError

PICTURE = Path(__file__).resolve().parents[1] / "demo" / "picture.jpg"
QUESTION = "What is in the picture?"


def direct_s(client: RelayClient) -> float:
    """Seconds to the first chunk over gRPC."""
    began = time.perf_counter()
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    with client.stream(messages=messages, images=[PICTURE], max_tokens=2) as stream:
        next(stream)
        took = time.perf_counter() - began
        list(stream)
    return took


def gateway_s(client: httpx.Client, body: dict[str, object]) -> float:
    """Seconds to the first words over HTTP."""
    began, took = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not took and line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                took = time.perf_counter() - began
    return took


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_ttft", description=__doc__)
    parser.add_argument("--gateway", default="http://127.0.0.1:9000")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    uri = "data:image/jpeg;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": QUESTION}]
    body: dict[str, object] = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 2}
    direct, through = [], []
    with RelayClient(arguments.url) as grpc, httpx.Client(base_url=arguments.gateway, trust_env=False) as http:
        for _ in range(5):
            direct_s(grpc), gateway_s(http, body)
        for _ in range(arguments.rounds):
            direct.append(direct_s(grpc))
            through.append(gateway_s(http, body))
    added_ms = statistics.median(b - a for a, b in zip(direct, through, strict=True)) * 1000
    medians = [statistics.median(each) * 1000 for each in (direct, through)]
    print(
        f"first token, median of {arguments.rounds}: gRPC {medians[0]:.1f} ms, gateway {medians[1]:.1f} ms, "
        f"{added_ms:+.1f} ms paired, ratio {medians[1] / medians[0]:.3f}"
    )


if __name__ == "__main__":
    try:
        main()
    except RelayClientError as error:
        sys.exit(str(error))
