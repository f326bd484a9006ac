"""The health port, in front of a server that is not there."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from launcher.probes import Health, Probes, Verdict, missing_stage
from launcher.server import PortBusy
from scheduler.placement import place
from scheduler.profile import parse_profile

WORKS = Verdict(True, "answers")
PLAN = place(parse_profile("[encode]\nreplicas = 2\n[decode]\nreplicas = 2\n", "pools"))


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Asked:
    """Answers in turn, the last one for ever; counts the questions."""

    def __init__(self, *verdicts: Verdict) -> None:
        self._verdicts = list(verdicts)
        self.num_asked = 0

    def __call__(self) -> Verdict:
        self.num_asked += 1
        return self._verdicts.pop(0) if len(self._verdicts) > 1 else self._verdicts[0]


@pytest.fixture
def probes() -> Iterator[Probes]:
    """A health port of 127.0.0.1."""
    listening = Probes("127.0.0.1", 0)
    yield listening
    listening.close()


def get(probes: Probes, path: str) -> tuple[int, str]:
    """Status and detail of an answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{probes.port}{path}", timeout=10) as response:
            return response.status, json.loads(response.read())["detail"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["detail"]


def health(ask: Callable[[], Verdict], missing: str | None = None, clock: Callable[[], float] | None = None) -> Health:
    return Health(missing=lambda: missing, ask=ask, clock=clock or Clock())


def test_a_server_that_loads_is_alive_and_not_ready(probes: Probes) -> None:
    assert get(probes, "/health/ready") == (503, "loading")
    assert get(probes, "/health/live") == (200, "loading")


@pytest.mark.parametrize("path", ["/health/ready", "/health/live"])
@pytest.mark.parametrize(
    ("verdict", "status"), [(WORKS, 200), (Verdict(True, "busy: no room"), 200), (Verdict(False, "no answer"), 503)]
)
def test_ready_and_alive_is_who_answers_or_is_busy(path: str, verdict: Verdict, status: int, probes: Probes) -> None:
    probes.attach(health(Asked(verdict)), lambda: True)

    assert get(probes, path) == (status, verdict.detail)


def test_a_stage_without_a_living_process_is_seen_without_a_question(probes: Probes) -> None:
    ask = Asked(WORKS)
    probes.attach(health(ask, missing="no decoder is alive: llava_decoder"), lambda: True)

    assert get(probes, "/health/ready") == (503, "no decoder is alive: llava_decoder")
    assert ask.num_asked == 0


def test_those_who_ask_often_share_one_answer() -> None:
    clock, ask = Clock(), Asked(WORKS, Verdict(False, "no answer"))
    known = health(ask, clock=clock)

    assert [known.check(), known.check()] == [WORKS, WORKS]
    clock.now_s += 5.0
    assert known.check() == Verdict(False, "no answer")
    assert ask.num_asked == 2


def test_after_a_death_the_question_is_asked_anew() -> None:
    missing: list[str | None] = [None, "no encoder is alive: clip_encoder", None]
    ask = Asked(WORKS)
    known = Health(missing=lambda: missing.pop(0), ask=ask, clock=Clock())

    assert [known.check().is_working for _ in range(3)] == [True, False, True]
    assert ask.num_asked == 2


@pytest.mark.parametrize(
    ("dead", "told"),
    [
        (set(), None),
        ({"clip_encoder_0", "llava_decoder_1"}, None),
        ({"clip_encoder_0", "clip_encoder_1"}, "no encoder is alive: clip_encoder_0, clip_encoder_1"),
        ({"llava_decoder_0", "llava_decoder_1"}, "no decoder is alive: llava_decoder_0, llava_decoder_1"),
        ({"llava"}, "llava is not alive"),
    ],
)
def test_a_stage_is_missing_when_none_of_its_replicas_lives(dead: set[str], told: str | None) -> None:
    assert missing_stage(PLAN, lambda name: name not in dead) == told


def test_a_draining_server_is_alive_not_ready_and_says_when_all_has_ended(probes: Probes) -> None:
    may_end = threading.Event()
    probes.attach(health(Asked(WORKS)), lambda: may_end.wait(10))
    answers: list[tuple[int, str]] = []
    order = threading.Thread(target=lambda: answers.append(get(probes, "/drain")))
    order.start()
    while get(probes, "/health/ready")[0] == 200:
        pass

    assert get(probes, "/health/ready") == (503, "draining")
    assert get(probes, "/health/live") == (200, "draining")
    may_end.set()
    order.join()
    assert answers == [(200, "drained")]


def test_requests_that_do_not_end_are_told(probes: Probes) -> None:
    probes.attach(health(Asked(WORKS)), lambda: False)

    assert get(probes, "/drain?after_s=0") == (503, "some requests did not finish in time")


@pytest.mark.parametrize("given", ["soon", "-1", "301", "nan"])
def test_a_wrong_delay_drains_nothing(given: str, probes: Probes) -> None:
    probes.attach(health(Asked(WORKS)), lambda: True)

    assert get(probes, f"/drain?after_s={given}") == (400, f"after_s must be 0 to 300 seconds, not {given}")
    assert get(probes, "/health/ready")[0] == 200


def test_an_unknown_path_names_those_that_are(probes: Probes) -> None:
    assert get(probes, "/healthz") == (404, "there are /health/ready, /health/live and /drain")


def test_a_busy_port_is_named_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortBusy) as refused:
            Probes("127.0.0.1", port)
    assert str(refused.value) == (
        f"health port {port} on 127.0.0.1: Address already in use; give another with --health-port"
    )
