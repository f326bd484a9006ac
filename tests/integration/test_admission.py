"""Who is served next, and what a client sees of it: priority, deadline and decision in plain JSON."""

from __future__ import annotations

import base64
import json
import queue
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from client import RelayClient
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION, assert_idle, metric, wait_until

NUM_LOW = 24


class Holder:
    """Keeps a place at the decoder until it is told to leave."""

    def __init__(self, client: RelayClient) -> None:
        self.has_begun, self.may_leave = threading.Event(), threading.Event()
        self._client = client

    def hold(self) -> None:
        with self._client.stream("Count from one to twenty.", max_tokens=1900, ignore_eos=True) as stream:
            for _ in stream:
                self.has_begun.set()
                if self.may_leave.is_set():
                    break


def test_an_urgent_request_behind_others_starts_next(server: Server) -> None:
    """All places are held; what waits at the decoder already starts before the urgent one, nobody else does."""
    decode, begun = server.plan.decode, queue.SimpleQueue[str]()

    def ask(name: str, priority: int) -> None:
        with client.stream("Count from one to twenty.", max_tokens=2, ignore_eos=True, priority=priority) as stream:
            for number, _ in enumerate(stream):
                if number == 0:
                    begun.put(name)

    with (
        RelayClient(f"127.0.0.1:{server.ports.grpc}") as client,
        ThreadPoolExecutor(decode.max_sequences + decode.max_waiting + NUM_LOW + 1) as pool,
    ):
        holders = [Holder(client) for _ in range(decode.max_sequences + decode.max_waiting)]
        admitted = metric(server, "vlm_relay_admitted_total")
        try:
            tasks = [pool.submit(holder.hold) for holder in holders]
            assert wait_until(lambda: sum(holder.has_begun.is_set() for holder in holders) == decode.max_sequences)
            assert wait_until(lambda: metric(server, "vlm_relay_admitted_total") - admitted == len(holders))
            tasks += [pool.submit(ask, "low", 10) for _ in range(NUM_LOW)]
            assert wait_until(lambda: metric(server, "vlm_relay_waiting_requests") == NUM_LOW)
            tasks.append(pool.submit(ask, "urgent", -10))
            assert wait_until(lambda: metric(server, "vlm_relay_waiting_requests") == NUM_LOW + 1)

            for holder in [holder for holder in holders if holder.has_begun.is_set()][: decode.max_waiting + 1]:
                holder.may_leave.set()

            assert begun.get(timeout=60) == "urgent"
        finally:
            for holder in holders:
                holder.may_leave.set()
        for task in tasks:
            task.result(timeout=120)
    assert [begun.get(timeout=0) for _ in range(NUM_LOW)] == ["low"] * NUM_LOW
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
