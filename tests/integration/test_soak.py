"""Many thousand requests, cancelled and not: the server ends where it began. `make slow` runs it."""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tqdm import tqdm

from client import DeadlineExceeded, Overloaded, RelayClient
from demo.pictures import draw_scene, render, to_jpeg
from launcher.server import Server
from tests.integration.observe import SHARED_MEMORY, assert_idle

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "20000"))
NUM_WARM_UP = 2000
CONCURRENCY = 24


@dataclass(frozen=True)
class Footprint:
    """What all processes of a server hold together."""

    resident_mib: int
    num_threads: int
    num_files: int
    shared_mib: int


def footprint(server: Server) -> Footprint:
    """Of tritonserver and its stubs, and of their files in /dev/shm."""
    pids = subprocess.run(["pgrep", "-s", str(server.pid)], capture_output=True, text=True).stdout.split()
    resident, threads, files = 0, 0, 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        resident += int(status.get("RssAnon", "0 kB").split()[0])
        threads += int(status["Threads"])
        files += len(os.listdir(f"/proc/{pid}/fd"))
    shared = sum(
        path.stat().st_blocks * 512
        for path in SHARED_MEMORY.glob("vlm_relay*")
        if f".{server.pid}-" in path.name or path.name.startswith(server.region)
    )
    return Footprint(resident >> 10, threads, files, shared >> 20)


@pytest.mark.slow
def test_thousands_of_requests_leave_the_server_as_it_was(server: Server) -> None:
    run(server, NUM_WARM_UP, seed=1)
    assert_idle(server)
    before = footprint(server)
    outcomes = run(server, NUM_REQUESTS, seed=2)
    assert_idle(server)
    after = footprint(server)
    print(f"\nbefore {before}\nafter  {after}\n{outcomes}")
    assert sum(outcomes.values()) == NUM_REQUESTS
    assert set(outcomes) <= {"stop", "length", "left", "late", "overloaded"}
    assert after.num_threads <= before.num_threads + 8
    assert after.num_files <= before.num_files + 8
    assert after.shared_mib <= before.shared_mib + 8
    assert after.resident_mib <= before.resident_mib * 1.1 + 64


def run(server: Server, num_requests: int, seed: int) -> Counter[str]:
    """Questions about a few hundred pictures: answered, left early, too late."""
    chance = random.Random(seed)
    pictures = [to_jpeg(render(draw_scene(chance), 336, 336)) for _ in range(200)]
    plans = [(chance.random(), chance.choice(pictures)) for _ in range(num_requests)]
    outcomes: Counter[str] = Counter()
    clients = [RelayClient(f"127.0.0.1:{server.ports.grpc}") for _ in range(4)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        tasks = pool.map(lambda item: one(clients[item[0] % 4], *item[1]), enumerate(plans))
        for outcome in tqdm(tasks, total=num_requests, desc="requests"):
            outcomes[outcome] += 1
    for client in clients:
        client.close()
    return outcomes


def one(client: RelayClient, kind: float, picture: bytes) -> str:
    """One request of a kind between 0 and 1; how it ended."""
    try:
        if kind < 0.5:
            return str(client.ask("What is in the picture?", images=[picture], max_tokens=8).finish_reason)
        if kind < 0.8:
            return str(client.ask("Who are you?", max_tokens=8).finish_reason)
        if kind < 0.95:
            with client.stream("Count from one to twenty.", max_tokens=300, ignore_eos=True) as stream:
                next(iter(stream))
            return "left"
        client.ask("Count from one to twenty.", max_tokens=1500, ignore_eos=True, deadline_s=0.05)
        return "length"
    except DeadlineExceeded:
        return "late"
    except Overloaded:
        return "overloaded"
