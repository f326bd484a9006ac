"""Requests share the stages: encodes and decodes are batched, cancels and deadlines stop them."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from client import DeadlineExceeded, RelayClient
from demo.pictures import draw_scene, render, to_jpeg
from launcher.server import Server
from tests.integration.observe import PICTURE, QUESTION, assert_idle, generated_at_the_end, metric

ENDLESS = {"max_tokens": 1800, "ignore_eos": True}


def test_32_concurrent_requests_are_encoded_and_decoded_together(server: Server) -> None:
    chance = random.Random(time.monotonic_ns())  # pictures that no test before has put into the cache
    pictures = [to_jpeg(render(draw_scene(chance), 400, 400)) for _ in range(32)]
    batches = _batches(server)
    images = metric(server, "vlm_relay_encode_batch_images_sum")
    large = _large_decodes(server)
    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client, ThreadPoolExecutor(32) as pool:
        answers = list(
            pool.map(lambda picture: client.ask(QUESTION, images=[picture], max_tokens=60, ignore_eos=True), pictures)
        )
    assert [answer.num_output_tokens for answer in answers] == [60] * 32
    encoded = metric(server, "vlm_relay_encode_batch_images_sum") - images
    assert encoded == 32
    assert encoded / (_batches(server) - batches) > 1, "no two images were encoded together"
    assert _large_decodes(server) > large, "never more than 8 sequences in one decode step"
    assert_idle(server)


def test_a_request_joins_and_leaves_without_stopping_another(client: RelayClient) -> None:
    with client.stream(QUESTION, images=[PICTURE], **ENDLESS) as long:
        chunks = iter(long)
        next(chunks)
        short = client.ask(QUESTION, images=[PICTURE], max_tokens=5)
        assert short.num_output_tokens == 5
        assert long.answer.finish_reason is None
        next(chunks)


def test_leaving_a_stream_stops_the_decoder(server: Server, client: RelayClient) -> None:
    assert_idle(server)
    before = generated_at_the_end(server)
    with client.stream(QUESTION, images=[PICTURE], **ENDLESS) as stream:
        next(iter(stream))
    assert_idle(server)
    assert generated_at_the_end(server) - before < ENDLESS["max_tokens"] / 2


def test_a_deadline_ends_a_request_in_time(client: RelayClient) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="deadline of 300 ms passed"):
        client.ask(QUESTION, images=[PICTURE], deadline_s=0.3, **ENDLESS)
    assert time.monotonic() - began < 1.0


def test_many_cancels_leave_nothing(server: Server) -> None:
    def start_and_leave(_: int) -> None:
        with client.stream(QUESTION, images=[PICTURE], **ENDLESS) as stream:
            next(iter(stream))

    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client, ThreadPoolExecutor(16) as pool:
        list(pool.map(start_and_leave, range(32)))
    assert_idle(server)


def test_a_full_house_answers_and_refuses_and_loses_nobody(server: Server) -> None:
    outcomes: list[str] = []
    lock = threading.Lock()

    def ask(_: int) -> None:
        try:
            client.ask("Who are you?", max_tokens=2)
            outcome = "ok"
        except Exception as error:
            outcome = type(error).__name__
        with lock:
            outcomes.append(outcome)

    limits = server.plan.limits
    num_requests = limits.max_in_flight + limits.max_waiting + 60
    with RelayClient(f"127.0.0.1:{server.ports.grpc}") as client, ThreadPoolExecutor(num_requests) as pool:
        list(pool.map(ask, range(num_requests)))
    assert len(outcomes) == num_requests
    assert set(outcomes) <= {"ok", "Overloaded"}
    assert outcomes.count("ok") >= limits.max_in_flight
    assert_idle(server)


def _batches(server: Server) -> float:
    return metric(server, "vlm_relay_encode_batch_images_count")


def _large_decodes(server: Server) -> float:
    """Steps in which more than 8 sequences decoded."""
    return metric(server, "vlm_relay_decode_batch_sequences_count") - metric(
        server, "vlm_relay_decode_batch_sequences_bucket", le="8.000000"
    )
