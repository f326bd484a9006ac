"""What a cluster sees of a real server: ready when it answers, red when a stage is dead, drained before it stops."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import Overloaded, RelayClient
from launcher.probes import health_of
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION, wait_until
from tests.integration.test_command import COMMAND, FREE_PORTS, READY
from tests.integration.test_survival import pid_of
from tests.process import Process

HEALTH = r"health on (http://\S+)/health/ready"


def get(url: str, timeout_s: float = 30) -> tuple[int, str]:
    """Status and detail of an answer; -1 when there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            return response.status, json.loads(response.read())["detail"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["detail"]
    except OSError as error:
        return -1, str(error)


@pytest.fixture
def probed(tmp_path: Path) -> Iterator[tuple[Process, str]]:
    """A server of its own, and the address of its health port."""
    started = Process(tmp_path / "serve.log", [COMMAND, "serve", *FREE_PORTS, "--health-port", "0"])
    yield started, started.wait_for(HEALTH)[1]
    started.end()


def test_a_server_that_answers_is_healthy(server: Server) -> None:
    verdict = health_of(server).check()

    assert (verdict.is_working, verdict.detail) == (True, "answers")


def test_an_order_to_drain_loses_no_request_and_the_stop_after_it_is_quick(probed: tuple[Process, str]) -> None:
    serving, url = probed
    address = serving.wait_for(READY)[1]
    drained: list[tuple[int, str]] = []
    assert get(f"{url}/health/ready") == (200, "answers")
    with RelayClient(address) as client:
        streams = [client.stream(QUESTION, images=[PICTURE], max_tokens=1400, ignore_eos=True) for _ in range(4)]
        for stream in streams:
            stream.__enter__()
            next(iter(stream))
        order = threading.Thread(target=lambda: drained.append(get(f"{url}/drain?after_s=2", 60)))
        order.start()
        assert wait_until(lambda: get(f"{url}/health/ready") == (503, "draining"))
        assert get(f"{url}/health/live") == (200, "draining")
        assert client.ask("Who are you?", max_tokens=1).num_output_tokens == 1  # not ready, and still serving
        time.sleep(2.2)
        with pytest.raises(Overloaded) as refused:
            client.ask("Who are you?", max_tokens=1)
        assert refused.value.retry_after_s == 5.0
        for stream in streams:
            for _ in stream:
                pass
            stream.__exit__(None, None, None)
            assert (stream.answer.finish_reason, stream.answer.num_output_tokens) == ("length", 1400)
    order.join()
    assert drained == [(200, "drained")]
    began = time.monotonic()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(60) == 0
    assert time.monotonic() - began < 30  # the rest of the chart's grace period


@pytest.mark.slow
def test_readiness_is_red_at_once_after_a_kill_and_green_when_the_stage_is_back(server: Server) -> None:
    health = health_of(server)
    assert health.check().is_working
    killed_s = time.monotonic()
    os.kill(pid_of(server, "llava_decoder"), signal.SIGKILL)

    assert wait_until(lambda: not health.check().is_working, 10)
    red_s = time.monotonic() - killed_s
    assert wait_until(lambda: health.check().is_working, 60)
    print(f"\nred {red_s:.2f} s after the kill, green again after {time.monotonic() - killed_s:.2f} s")
