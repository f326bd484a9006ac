from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from client.errors import InvalidRequest
from client.gateway.gauges import gauges_from
from client.gateway.pipeline import pipeline_from, read_pipeline
from client.gateway.record import NEWS_S
from client.gateway.settings import Settings
from tests.unit.gateway.conftest import PLAN, Gateway, Start, Upstream, image_part

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_model_is_listed_and_can_be_looked_up(gateway: Gateway) -> None:
    listed = gateway.http.get("/v1/models").json()
    looked_up = gateway.http.get("/v1/models/llava").json()

    assert listed == {"object": "list", "data": [looked_up]}
    assert (looked_up["id"], looked_up["object"]) == ("llava", "model")


def test_a_request_id_is_echoed_and_sent_on(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("yes")
    body = {"messages": [{"role": "user", "content": "What?"}]}

    response = gateway.http.post("/v1/chat/completions", json=body, headers={"X-Request-ID": "mine-1"})

    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "chatcmpl-mine-1"
    assert upstream.requests[0].id == "mine-1"


@pytest.mark.parametrize("given", ["a b", "x" * 129, ""])
def test_an_odd_request_id_is_replaced(gateway: Gateway, given: str) -> None:
    response = gateway.http.get("/health/live", headers={"X-Request-ID": given})

    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize(("given", "sent_on"), [(TRACE, TRACE), ("nonsense", None)])
def test_a_trace_context_is_sent_on(upstream: Upstream, gateway: Gateway, given: str, sent_on: str | None) -> None:
    upstream.answers("yes")
    body = {"messages": [{"role": "user", "content": "What?"}]}

    gateway.http.post("/v1/chat/completions", json=body, headers={"traceparent": given})

    assert upstream.metadata[0].get("traceparent") == sent_on


@pytest.mark.parametrize(
    ("given", "status"), [({}, 401), ({"Authorization": "Bearer no"}, 401), ({"Authorization": "bearer b"}, 200)]
)
def test_with_keys_set_only_a_right_one_opens_the_api(start: Start, given: dict[str, str], status: int) -> None:
    gateway = start(api_keys=frozenset({"a", "b"}))

    response = gateway.http.get("/v1/models", headers=given)

    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_probes_and_metrics_need_no_key(start: Start, upstream: Upstream) -> None:
    upstream.answers("a")
    gateway = start(api_keys=frozenset({"a"}))

    statuses = [gateway.http.get(path).status_code for path in ("/health", "/health/live", "/metrics", "/")]

    assert statuses == [200, 200, 200, 200]
    assert gateway.http.get("/scheduler/events").status_code == 401


def test_health_is_one_small_question_with_a_picture_shared_by_all_who_ask(
    upstream: Upstream, gateway: Gateway
) -> None:
    upstream.answers("a")

    answers = [gateway.http.get("/health") for _ in range(3)]

    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "ok")] * 3
    assert len(upstream.requests) == 1
    assert upstream.sampling() == {"max_tokens": 1}
    assert b"PNG" in upstream.tensors()["image"]


@pytest.mark.parametrize(
    ("message", "status", "word"),
    [
        ("[UNAVAILABLE] full; retry after 1 s", 200, "busy"),
        ("[UNAVAILABLE] the decoder died", 503, "failed"),
        ("[INTERNAL] see the log", 503, "failed"),
    ],
)
def test_a_busy_server_is_healthy_and_a_broken_one_is_not(
    upstream: Upstream, gateway: Gateway, message: str, status: int, word: str
) -> None:
    upstream.play([upstream.fail(message), upstream.final()])

    response = gateway.http.get("/health")

    assert (response.status_code, response.json()["status"]) == (status, word)


def test_a_silent_server_fails_the_health_check_in_time(start: Start, upstream: Upstream) -> None:
    upstream.play([upstream.silence()])

    response = start(health_timeout_s=0.3).http.get("/health")

    assert response.status_code == 503
    assert "within 0.3 s" in response.json()["detail"]


def test_requests_and_tokens_are_counted(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("a ", "car")

    gateway.chat()
    gateway.chat(n=2)

    assert gateway.is_idle()
    endpoint = 'vlm_relay_gateway_requests_total{endpoint="/v1/chat/completions",status='
    assert (gateway.metric(endpoint + '"200"}'), gateway.metric(endpoint + '"400"}')) == (1, 1)
    assert gateway.metric('vlm_relay_gateway_tokens_total{direction="prompt"}') == 3
    assert gateway.metric('vlm_relay_gateway_tokens_total{direction="completion"}') == 2
    assert gateway.metric("vlm_relay_gateway_ttft_seconds_count") == 1


def _events(lines: Iterator[str], kind: str) -> Iterator[dict[str, object]]:
    for line in lines:
        if line == f"event: {kind}":
            yield json.loads(next(lines).removeprefix("data: "))


def test_watchers_see_each_state_of_a_request_and_nothing_of_its_text(upstream: Upstream, gateway: Gateway) -> None:
    decision = '{"encoder":"clip_encoder","decoder":"llava_decoder"}'
    upstream.play([upstream.chunk("secret", decision=decision), upstream.chunk("!", "stop"), upstream.final()])

    with gateway.http.stream("GET", "/scheduler/events") as watching:
        lines = watching.iter_lines()
        next(lines)
        gateway.chat([{"type": "text", "text": "a secret?"}, image_part(b"A")])
        events = _events(lines, "request")
        seen = [next(events) for _ in range(3)]

    assert [event["state"] for event in seen] == ["waiting", "answering", "answered"]
    assert seen[1]["decision"] == json.loads(decision)
    assert (seen[2]["num_images"], seen[2]["num_output_tokens"], seen[2]["error"]) == (1, 2, None)
    assert "secret" not in json.dumps(seen)


def test_watchers_see_where_a_request_is_before_its_first_token(upstream: Upstream, gateway: Gateway) -> None:
    decision = '{"encoder":"e0","encoders":["e0"],"decoder":"d1"}'
    upstream.play(
        [
            upstream.chunk(progress="placed", decision=decision),
            upstream.chunk(progress="encoded"),
            upstream.chunk("a car", "stop"),
            upstream.final(),
        ]
    )

    with gateway.http.stream("GET", "/scheduler/events") as watching:
        lines = watching.iter_lines()
        next(lines)
        gateway.chat([image_part(b"A")])
        events = _events(lines, "request")
        seen = [next(events) for _ in range(5)]

    assert [event["state"] for event in seen] == ["waiting", "encoding", "prefilling", "answering", "answered"]
    assert [event["decision"] for event in seen] == [None, *[json.loads(decision)] * 4]


def test_nobody_is_asked_for_progress_when_nobody_watches(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("a car")

    gateway.chat()

    assert "return_progress" not in upstream.tensors()


def test_watchers_see_a_long_answer_grow(upstream: Upstream, start: Start) -> None:
    gateway = start()
    gates = [threading.Event(), threading.Event()]
    more = [upstream.held(gate, upstream.chunk(" more")) for gate in gates]
    upstream.play([upstream.chunk("a"), *more, upstream.chunk(".", "stop"), upstream.final()])

    with gateway.http.stream("GET", "/scheduler/events") as watching:
        lines = watching.iter_lines()
        next(lines)
        asking = threading.Thread(target=gateway.chat)
        asking.start()
        events = _events(lines, "request")
        counts = [next(events)["num_output_tokens"] for _ in range(2)]
        for gate in gates:
            time.sleep(1.1 * NEWS_S)
            gate.set()
            counts.append(next(events)["num_output_tokens"])
        asking.join()

    assert counts == [0, 1, 2, 3]


def test_a_watcher_is_told_the_pipeline_first(start: Start) -> None:
    gateway = start(pipeline=pipeline_from(PLAN))

    with gateway.http.stream("GET", "/scheduler/events") as watching:
        told = next(_events(watching.iter_lines(), "pipeline"))

    assert told["replicas"] == [
        {"name": "clip_encoder", "stage": "encode", "place": "cuda:0", "hardware": "NVIDIA L40S", "room": 64},
        {"name": "llava_decoder", "stage": "decode", "place": "cuda:1", "hardware": None, "room": 32},
    ]
    assert told["links"] == [{"first": "cuda:0", "second": "cuda:1", "link": "NV4", "gigabytes_per_s": 100.0}]
    assert told["limits"] == {"max_in_flight": 128, "max_waiting": 512}


@pytest.mark.parametrize(
    ("text", "words"), [("{", "Invalid JSON"), ("{}", "encoders: Field required"), ("[]", "is no plan of a server")]
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)

    with pytest.raises(InvalidRequest, match=words) as refused:
        read_pipeline(path)

    assert str(path) in str(refused.value)


def test_a_late_watcher_sees_the_latest_requests(upstream: Upstream, gateway: Gateway) -> None:
    upstream.answers("yes")
    gateway.chat()
    assert gateway.is_idle()

    with gateway.http.stream("GET", "/scheduler/events") as watching:
        lines = watching.iter_lines()
        seen = next(_events(lines, "request"))

    assert seen["state"] == "answered"


def test_watchers_are_told_the_gauges_also_when_there_are_none(start: Start) -> None:
    gateway = start(metrics_url="http://127.0.0.1:1/metrics", gauges_every_s=0.05)

    with gateway.http.stream("GET", "/scheduler/events") as watching:
        assert next(_events(watching.iter_lines(), "gauges")) == {}


def test_gauges_are_summed_for_each_replica() -> None:
    text = (
        "# TYPE vlm_relay_running_sequences gauge\n"
        'vlm_relay_running_sequences{model="d0",instance="a"} 2\n'
        'vlm_relay_running_sequences{model="d0",instance="b"} 3\n'
        'vlm_relay_running_sequences{model="d1"} 4\n'
        "# TYPE vlm_relay_deaths counter\n"
        'vlm_relay_deaths_total{model="llava",replica="d1"} 1\n'
        "# TYPE nv_other gauge\nnv_other 7\n"
    )

    assert gauges_from(text) == {
        "d0": {"vlm_relay_running_sequences": 5.0},
        "d1": {"vlm_relay_running_sequences": 4.0, "vlm_relay_deaths_total": 1.0},
    }


def test_stopping_ends_watchers_and_lets_a_running_answer_finish(upstream: Upstream, start: Start) -> None:
    gateway = start()
    go_on = threading.Event()
    late = upstream.chunk("car", "stop")
    upstream.play([upstream.chunk("a "), lambda *given: late(*given) if go_on.wait(10) else None, upstream.final()])
    body = {"messages": [{"role": "user", "content": "What?"}], "stream": True}

    with (
        httpx.Client(base_url=gateway.url, timeout=20, trust_env=False) as http,
        http.stream("GET", "/scheduler/events") as watching,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        gateway.server.stop()
        assert "event: request" in list(watching.iter_lines())
        go_on.set()
        rest = list(lines)

    assert rest[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_images", 0),
        ("deadline_s", float("nan")),
        ("api_keys", frozenset({" a"})),
        ("metrics_url", "x:1"),
        ("url", "x"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name if name not in ("url", "api_keys") else "address|API key"):
        Settings(**{name: value})  # type: ignore[arg-type]


def test_an_idle_connection_is_given_up_by_the_client_first(gateway: Gateway) -> None:
    client_s = httpx.Limits().keepalive_expiry

    assert client_s is not None
    assert gateway.server.config.timeout_keep_alive > 2 * client_s
