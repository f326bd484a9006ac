"""A stage that is killed takes no request with it: streams go on elsewhere, and it comes back.

`make slow` runs these. A kill at an unlucky instant takes tritonserver 2.51 itself along
(`boost::interprocess::lock_exception` in its Python backend, seen once in some ten to fifty kills). The launcher then
starts it anew and streams break off with an error: a run in which that happens fails here.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from client import RelayClient, RelayClientError
from demo.pictures import draw_scene, render, to_jpeg
from launcher.serve import running
from launcher.server import Server
from scheduler.placement import place
from scheduler.profile import parse_profile
from tests.integration.observe import PICTURE, QUESTION, assert_idle, files_in_shared_memory, metric, wait_until

pytestmark = pytest.mark.slow

POOLS = """
[encode]
replicas = 2
[decode]
replicas = 2
threads = 1
"""
BACK_S = 60.0  # seconds on a quiet machine; this one may be busy


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two encoders and two decoders."""
    log_path = tmp_path_factory.mktemp("pools") / "server.log"
    plan = place(parse_profile(POOLS, "pools"))
    with (
        log_path.open("w") as log,
        running(plan, ("127.0.0.1", 0, 0, 0), os.environ, lambda _: None, log) as server,
    ):
        yield server
    assert files_in_shared_memory(server) == []


def pid_of(server: Server, replica: str) -> int:
    """The process that beats for a replica."""
    (path,) = Path("/dev/shm").glob(f"vlm_relay.pulse.{server.pid}-*.{replica}")
    return int(struct.unpack("<QQQ", path.read_bytes())[0])


def kill(server: Server, replica: str) -> None:
    """SIGKILL, as an out-of-memory killer does."""
    os.kill(pid_of(server, replica), signal.SIGKILL)


def wait_back(server: Server, replica: str, recoveries: float) -> None:
    """Until the scheduler says that the replica is back."""
    assert wait_until(lambda: metric(server, "vlm_relay_recoveries_total", replica=replica) > recoveries, BACK_S), (
        f"{replica} did not come back"
    )


def test_a_stream_whose_decoder_is_killed_goes_on_with_the_identical_text(pools: Server) -> None:
    options = {"max_tokens": 400, "ignore_eos": True}
    with RelayClient(f"127.0.0.1:{pools.ports.grpc}") as client:
        alone = client.ask(QUESTION, images=[PICTURE], **options)
        with client.stream(QUESTION, images=[PICTURE], return_decision=True, **options) as stream:
            chunks = iter(stream)
            for _ in range(5):
                next(chunks)
            assert stream.answer.decision is not None
            decoder = str(stream.answer.decision["decoder"])
            recoveries = metric(pools, "vlm_relay_recoveries_total", replica=decoder)
            kill(pools, decoder)
            killed = time.monotonic()
            next(chunks)
            assert time.monotonic() - killed < 5
            for _ in chunks:
                pass
    assert stream.answer.text == alone.text
    assert stream.answer.num_output_tokens == 400
    wait_back(pools, decoder, recoveries)
    assert_idle(pools)


def test_nothing_is_lost_or_doubled_while_an_encoder_and_a_decoder_are_killed(pools: Server) -> None:
    chance = random.Random(7)
    pictures = [to_jpeg(render(draw_scene(chance), 336, 336)) for _ in range(48)]
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    lock = threading.Lock()

    def ask(index: int) -> None:
        nonlocal slowest_s
        client = clients[index % len(clients)]
        with client.stream(QUESTION, images=[pictures[index]], max_tokens=40, ignore_eos=True) as stream:
            last_s = time.monotonic()
            pause_s = 0.0
            for _ in stream:
                pause_s = max(pause_s, time.monotonic() - last_s)
                last_s = time.monotonic()
        with lock:
            outcomes[f"{stream.answer.finish_reason} {stream.answer.num_output_tokens}"] += 1
            slowest_s = max(slowest_s, pause_s)

    killed = ("clip_encoder_1", "llava_decoder_0")
    back = {name: metric(pools, "vlm_relay_recoveries_total", replica=name) for name in killed}
    clients = [RelayClient(f"127.0.0.1:{pools.ports.grpc}") for _ in range(4)]
    with ThreadPoolExecutor(12) as pool:
        tasks = [pool.submit(ask, index) for index in range(len(pictures))]
        assert wait_until(lambda: sum(task.done() for task in tasks) >= 4, 60)
        kill(pools, "clip_encoder_1")
        assert wait_until(lambda: sum(task.done() for task in tasks) >= 10, 60)
        kill(pools, "llava_decoder_0")
        for task in tasks:
            task.result(timeout=120)
    for client in clients:
        client.close()
    assert outcomes == {"length 40": len(pictures)}
    assert slowest_s < 5, "a stream stood still"
    for name, recoveries in back.items():
        wait_back(pools, name, recoveries)
    assert_idle(pools)


def test_a_killed_scheduler_ends_its_streams_and_the_server_is_started_anew(pools: Server) -> None:
    with RelayClient(f"127.0.0.1:{pools.ports.grpc}") as client:
        orphans = [client.stream(QUESTION, images=[PICTURE], max_tokens=1200, ignore_eos=True) for _ in range(6)]
        for orphan in orphans:
            orphan.__enter__()
            next(iter(orphan))
        kill(pools, "llava")
        killed = time.monotonic()
        for orphan in orphans:
            with pytest.raises(RelayClientError):
                for _ in orphan:
                    pass
            orphan.close()
        assert time.monotonic() - killed < 5

        def answers() -> bool:
            try:
                return client.ask("Who are you?", max_tokens=1, deadline_s=5).num_output_tokens == 1
            except RelayClientError:
                return False

        assert wait_until(answers, BACK_S)
        assert client.ask(QUESTION, images=[PICTURE], max_tokens=1).num_output_tokens == 1


def test_with_the_only_replica_of_a_stage_dead_requests_are_refused_with_a_hint_until_it_is_back(
    pools: Server,
) -> None:
    from client import Overloaded

    names = ("clip_encoder_0", "clip_encoder_1")
    back = {name: metric(pools, "vlm_relay_recoveries_total", replica=name) for name in names}
    with RelayClient(f"127.0.0.1:{pools.ports.grpc}") as client:
        for name in names:
            kill(pools, name)
        with pytest.raises(Overloaded) as refused:
            client.ask(QUESTION, images=[to_jpeg(render(draw_scene(random.Random(1)), 300, 300))], max_tokens=1)
        assert refused.value.retry_after_s == 5.0
        assert client.ask("Who are you?", max_tokens=1).num_output_tokens == 1
        for name, recoveries in back.items():
            wait_back(pools, name, recoveries)
        assert client.ask(QUESTION, images=[PICTURE], max_tokens=1).num_output_tokens == 1
    assert_idle(pools)
