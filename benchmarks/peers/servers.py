"""Server against server: `vlm-relay up` and vLLM's on one checkpoint, asked in turns by one client of OpenAI's API.

    python -m benchmarks.peers.servers --geometry medium --concurrent 1 4 16 --tokens 64 256

Each request has a picture of its own (both encode it; the encoder is tiny) and streams an answer of exactly that many
tokens; N arrive together. `first` is the time to the first words of any, `total` until all have ended. vLLM's processes
are stopped (SIGSTOP) while the other side is asked. Ours are not, since its stages would be taken for dead: what it
uses while idle is part of vLLM's times, and is told. vLLM's environment: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
from tqdm import tqdm

from benchmarks.arguments import at_least_one
from benchmarks.peers import RESULTS, python_of
from benchmarks.peers.checkpoint import write_for_peers
from benchmarks.processor_time import ROLES, between, processor_time
from benchmarks.provenance import provenance
from demo.pictures import draw_scene, render, to_jpeg
from launcher.server import choose_ports
from python_backend.checkpoint import PROJECT_ROOT

MEASURED = ("python_backend", "scheduler", "client", "launcher", "benchmarks/peers")
PROFILE = """
[model]
checkpoint = "{checkpoint}"
artifacts = "{folder}/artifacts"
[encode]
threads = 1
[decode]
threads = 2
dtype = "bfloat16"
max_sequences = 16
step_tokens = 2048
kv_cache_mib = 2048
[limits]
encode_transfer_warn_ms = 1000
"""
VLLM_FLAGS = (
    "--dtype=bfloat16 --max-num-seqs=16 --max-model-len=2048 --max-num-batched-tokens=2048 --no-enable-prefix-caching "
    "--mm-processor-cache-gb=0 --served-model-name=llava --host=127.0.0.1"
)
VLLM_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
READY_S, ANSWER_S, IDLE_S = 300.0, 300.0, 5.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and the session of its processes."""

    url: str
    session: int
    may_stand: bool

    def stand(self, stands: bool) -> None:
        """Stops all its processes, or lets them go on."""
        if self.may_stand:
            os.killpg(self.session, signal.SIGSTOP if stands else signal.SIGCONT)


@contextlib.contextmanager
def serving(command: list[str], port: int, log: Path, may_stand: bool) -> Iterator[Server]:
    """A server that answers on a port, ended afterwards."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=PROJECT_ROOT, env=os.environ | VLLM_VARIABLES, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until_s = time.monotonic() + READY_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"{command[0]} does not serve: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield Server(url, process.pid, may_stand)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", trust_env=False, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


async def ask(client: httpx.AsyncClient, picture: bytes, num_tokens: int) -> float:
    """One answer; when its first words came."""
    uri = "data:image/jpeg;base64," + base64.b64encode(picture).decode()
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What is in the picture?"}]
    body = {
        "model": "llava",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_s = 0.0
    usage: dict[str, int] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{client.base_url}: {response.status_code} {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if not first_s and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first_s = time.perf_counter()
    if usage.get("completion_tokens") != num_tokens or not first_s:
        raise SystemExit(f"{client.base_url}: {usage} instead of {num_tokens} tokens")
    return first_s


async def measure(server: Server, pictures: list[bytes], num_tokens: int) -> dict[str, float]:
    """Answers to requests that arrive together."""
    server.stand(False)
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_S, trust_env=False) as client:
        began_s = time.perf_counter()
        firsts_s = await asyncio.gather(*(ask(client, picture, num_tokens) for picture in pictures))
        total_s = time.perf_counter() - began_s
    server.stand(True)
    return {"first_s": min(firsts_s) - began_s, "total_s": total_s}


def compare(
    sides: dict[str, Server], num_requests: int, num_tokens: int, num_rounds: int, chance: random.Random
) -> dict[str, object]:
    """One line of the table: medians, and of the paired rounds the ratios. The first round warms up."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(num_rounds + 1):
        for name, server in sides.items():
            pictures = [to_jpeg(render(draw_scene(chance), 336, 336)) for _ in range(num_requests)]
            found = asyncio.run(measure(server, pictures, num_tokens if number else 8))
            if number:
                rounds[name].append(found)
    row: dict[str, object] = {"concurrent": num_requests, "tokens": num_tokens}
    for name, found_rounds in rounds.items():
        row[name] = {key: median(each[key] for each in found_rounds) for key in found_rounds[0]}
    pairs = list(zip(rounds["own"], rounds["vllm"], strict=True))
    row["first_over_vllm"] = median(own["first_s"] / theirs["first_s"] for own, theirs in pairs)
    row["requests_per_s_over_vllm"] = median(theirs["total_s"] / own["total_s"] for own, theirs in pairs)
    return row


def idle_share() -> float:
    """Of all CPUs, what the servers use that are not asked: the vLLM that stands still uses nothing."""
    before = processor_time()
    time.sleep(IDLE_S)
    used = between(before, processor_time())
    return sum(used[role] for role in ROLES) / IDLE_S / (os.cpu_count() or 1)


def main() -> None:
    """Run both servers and write one JSON file."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.servers", description=about)
    parser.add_argument("--geometry", choices=("small", "medium"), default="small")
    parser.add_argument("--concurrent", type=at_least_one, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=at_least_one, nargs="+", default=[64])
    parser.add_argument("--rounds", type=at_least_one, default=3)
    arguments = parser.parse_args()
    python, free = python_of("vllm"), choose_ports("127.0.0.1", 0, 0, 0)
    ports = [free.http, free.grpc]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        checkpoint = folder / "checkpoint"
        write_for_peers(arguments.geometry, checkpoint)
        profile = folder / "profile.toml"
        profile.write_text(PROFILE.format(checkpoint=checkpoint, folder=folder))
        theirs = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={checkpoint}"]
        theirs += [f"--port={ports[1]}", *VLLM_FLAGS.split()]
        own = [sys.executable, "-m", "launcher", "up", f"--profile={profile}", f"--port={ports[0]}"]
        own += ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
        sides = {"vllm": stack.enter_context(serving(theirs, ports[1], folder / "vllm.log", True))}
        sides["vllm"].stand(True)
        sides["own"] = stack.enter_context(serving(own, ports[0], folder / "own.log", False))
        cases = [(count, tokens) for tokens in arguments.tokens for count in arguments.concurrent]
        share, rows, chance = idle_share(), [], random.Random(1)  # no picture twice: caches shall not help
        for count, tokens in tqdm(cases, desc="comparing", unit="case"):
            rows.append(compare(sides, count, tokens, arguments.rounds, chance))
            tqdm.write(json.dumps(rows[-1]))
    report = {
        "provenance": provenance("benchmarks.peers.servers", sys.argv[1:], MEASURED),
        "idle_share": share,
        "rows": rows,
    }
    path = RESULTS / f"peers_servers_{arguments.geometry}_{'_'.join(map(str, arguments.tokens))}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
