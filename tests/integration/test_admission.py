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

NUM_LOW = 24


class Holder:
    """Keeps a place at the decoder until it is told to leave."""

    def __init__(self, client: RelayClient, priority: int = 0, max_tokens: int = 1900) -> None:
        self.has_begun, self.may_leave = threading.Event(), threading.Event()
        self._client = client
        self._options = {"priority": priority, "max_tokens": max_tokens, "ignore_eos": True}

    def hold(self) -> None:
        with self._client.stream("Count from one to twenty.", **self._options) as stream:
            for _ in stream:
                self.has_begun.set()
                if self.may_leave.is_set():
                    break


def test_an_urgent_request_behind_others_starts_next(server: Server) -> None:
    """All places are held; what waits at the decoder already starts before the urgent one, nobody else does."""
    decode = server.plan.decode
    num_places = decode.max_sequences + decode.max_waiting

    with (
        RelayClient(f"127.0.0.1:{server.ports.grpc}") as client,
        ThreadPoolExecutor(num_places + NUM_LOW + 1) as pool,
    ):
        holders = [Holder(client) for _ in range(num_places)]
        # Of the low ones little is wanted, or the last would be refused: it would wait for too long.
        low, urgent = [Holder(client, 10, 2) for _ in range(NUM_LOW)], Holder(client, -10)
        admitted = metric(server, "vlm_relay_admitted_total")
        try:
            tasks = [pool.submit(holder.hold) for holder in holders]
            assert wait_until(lambda: sum(holder.has_begun.is_set() for holder in holders) == decode.max_sequences)
            assert wait_until(lambda: metric(server, "vlm_relay_admitted_total") - admitted == len(holders))
            tasks += [pool.submit(holder.hold) for holder in low]
            assert wait_until(lambda: metric(server, "vlm_relay_waiting_requests") == NUM_LOW)
            tasks.append(pool.submit(urgent.hold))
            assert wait_until(lambda: metric(server, "vlm_relay_waiting_requests") == NUM_LOW + 1)

            for holder in [holder for holder in holders if holder.has_begun.is_set()][: decode.max_waiting + 1]:
                holder.may_leave.set()

            assert wait_until(urgent.has_begun.is_set)
            assert not any(holder.has_begun.is_set() for holder in low)
        finally:
            for holder in [*holders, *low, urgent]:
                holder.may_leave.set()
        for task in tasks:
            task.result(timeout=120)
    assert all(holder.has_begun.is_set() for holder in low)
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
