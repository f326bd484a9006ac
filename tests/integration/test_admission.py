"""Who is served next, and what a client sees of it: priority, deadline and decision in plain JSON."""

from __future__ import annotations

import base64
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from client import RelayClient
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION, assert_idle, metric, wait_until

NUM_LOW = 64


def test_an_urgent_request_behind_64_others_starts_next(server: Server) -> None:
    lock = threading.Lock()
    begun: list[str] = []

    def ask(name: str, priority: int, num_tokens: int) -> None:
        options = {"max_tokens": num_tokens, "ignore_eos": True, "priority": priority}
        with client.stream("Count from one to twenty.", **options) as stream:
            for number, _ in enumerate(stream):
                if number == 0:
                    with lock:
                        begun.append(name)

    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client, ThreadPoolExecutor(NUM_LOW + 1) as pool:
        admitted = metric(server, "vlm_relay_admitted_total")
        # Of different lengths, so that places become free one after the other.
        tasks = [pool.submit(ask, "low", 10, 150 + 10 * number) for number in range(NUM_LOW)]
        assert wait_until(lambda: metric(server, "vlm_relay_waiting_requests") >= 12, 60)
        tasks.append(pool.submit(ask, "urgent", -10, 1))
        # From when it has come to the scheduler: on a busy machine its client and Triton take long to bring it there.
        assert wait_until(lambda: metric(server, "vlm_relay_admitted_total") - admitted > NUM_LOW, 60)
        with lock:
            num_before = len(begun)
        for task in tasks:
            task.result(timeout=120)
    # Those that wait at the decoder already may start before it; nobody behind them does.
    num_between = begun.index("urgent") - num_before
    assert num_before + num_between < NUM_LOW - 8, "there was nobody to overtake"
    assert num_between <= server.plan.decode.max_waiting + 2, f"{num_between} others began before the urgent one"
    assert_idle(server)


def _generate(server: Server, **more: object) -> dict[str, object]:
    """The answer to a question about the picture, in plain JSON as curl sends it."""
    body = {"text_input": QUESTION, "image": base64.b64encode(PICTURE.read_bytes()).decode(), **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.ports.http}/v2/models/llava/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.loads(response.read()))


def test_plain_json_carries_priority_and_deadline_and_gets_the_decision(server: Server) -> None:
    answer = _generate(server, priority=-5, deadline_ms=30_000, return_decision=True, max_tokens=4)

    decision = json.loads(str(answer["decision"]))
    assert (decision["encoder"], decision["decoder"], decision["policy"]) == ("clip_encoder", "llava_decoder", "cost")
    assert decision["predicted"]["step_s"] > 0
    assert decision["observed"]["prefill_s"] > 0
    assert decision["reason"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"priority": 101}, "priority must be between -100 and 100, not 101"),
        ({"deadline_ms": 1, "max_tokens": 1000, "ignore_eos": True}, "[DEADLINE_EXCEEDED] the deadline of 1 ms passed"),
    ],
)
def test_plain_json_is_told_what_was_wrong(server: Server, more: dict[str, object], said: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        _generate(server, **more)

    assert said in refused.value.read().decode()
