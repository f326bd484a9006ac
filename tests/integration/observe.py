"""What the integration tests look at: the server's metrics, shared memory, a neighbour's answer."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from client import RelayClient
from launcher.server import Server

SHARED_MEMORY = Path("/dev/shm")
PICTURE = Path("demo/picture.jpg")
QUESTION = "What is in the picture?"
ANSWER = "a red circle to the left of a blue square"


def files_in_shared_memory(server: Server) -> list[str]:
    """What lies in /dev/shm of this very server: embeddings, key, and Triton's own regions."""
    names = [path.name for path in SHARED_MEMORY.glob("vlm_relay*")]
    return [name for name in names if f".{server.pid}-" in name or name.startswith(server.region)]


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum of a metric over all its samples that carry these labels; 0 when there is none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics", timeout=10) as response:
        text = response.read().decode()
    total = 0.0
    for found, value in re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE):
        given = dict(re.findall(r'(\w+)="([^"]*)"', found))
        if labels.items() <= given.items():
            total += float(value)
    return total


def num_threads(server: Server, model: str) -> int:
    """Of the process of a model."""
    command = ["pgrep", "-s", str(server.pid), "-f", f"models/{model}/1/model.py"]
    (pid,) = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Polls until the condition holds; whether it did in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def generated_at_the_end(server: Server) -> float:
    """The tokens that were generated in all, once no more are: the counter is told four times a second."""

    def stands_still() -> bool:
        before = metric(server, "vlm_relay_generated_tokens_total")
        time.sleep(0.5)
        return metric(server, "vlm_relay_generated_tokens_total") == before

    assert wait_until(stands_still)
    return metric(server, "vlm_relay_generated_tokens_total")


def assert_idle(server: Server) -> None:
    """Nothing in flight, no running or waiting sequence, no lease out: on every stage."""
    names = (
        "vlm_relay_in_flight_requests",
        "vlm_relay_waiting_requests",
        "vlm_relay_running_sequences",
        "vlm_relay_waiting_sequences",
    )

    def busy() -> dict[str, float]:
        values = {name: metric(server, name) for name in names}
        return {name: value for name, value in values.items() if value}

    assert wait_until(lambda: not busy()), busy()


@contextlib.contextmanager
def unchanged_neighbour(client: RelayClient, picture: Path, question: str) -> Iterator[None]:
    """A long answer that streams while the block runs, and must come out as it does alone."""
    alone = client.ask(question, images=[picture], max_tokens=200, ignore_eos=True)
    with client.stream(question, images=[picture], max_tokens=200, ignore_eos=True) as stream:
        chunks = iter(stream)
        text = next(chunks).text
        yield
        text += "".join(chunk.text for chunk in chunks)
    assert text == alone.text
