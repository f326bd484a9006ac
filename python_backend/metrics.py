"""The metrics of the serving side: their names, kinds and meaning, in one table.

Whoever has something to count holds a `Meter`; only `models/metrics.py` knows Triton's metrics. `deploy/metrics.md`
is for those who read them; a test compares it with a running server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["counter", "gauge", "histogram"]
Stage = Literal["llava", "clip_encoder", "llava_decoder"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_COPIES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_BATCHES = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family of a stage's processes, labelled with `model` and `labels`.

    `buckets` are upper bounds, for histograms only.
    """

    stage: Stage
    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _llava() -> tuple[Metric, ...]:
    return (
        Metric("llava", "vlm_relay_requests_total", "counter", "Requests ended, by outcome", ("outcome",)),
        Metric("llava", "vlm_relay_admitted_total", "counter", "Requests that were let in"),
        Metric("llava", "vlm_relay_rejected_total", "counter", "Requests that were not let in", ("reason",)),
        Metric("llava", "vlm_relay_queue_seconds", "histogram", "Arrival to a place", ("priority",), _SECONDS),
        Metric("llava", "vlm_relay_pending_images", "gauge", "Images placed and not yet encoded", ("replica",)),
        Metric("llava", "vlm_relay_pending_tokens", "gauge", "Tokens placed and not yet computed", ("replica",)),
        Metric(
            "llava",
            "vlm_relay_transferred_bytes_total",
            "counter",
            "Embeddings taken by a decoder",
            ("encoder", "decoder"),
        ),
        Metric("llava", "vlm_relay_in_flight_requests", "gauge", "Requests being served"),
        Metric("llava", "vlm_relay_waiting_requests", "gauge", "Requests admitted and waiting for a place"),
        Metric("llava", "vlm_relay_decisions_total", "counter", "Placements", ("mode", "reason")),
        Metric("llava", "vlm_relay_deaths_total", "counter", "Stage processes that died", ("replica",)),
        Metric("llava", "vlm_relay_recoveries_total", "counter", "Stage processes that came back", ("replica",)),
        Metric("llava", "vlm_relay_retries_total", "counter", "Requests tried again because a stage died"),
        Metric("llava", "vlm_relay_ttft_seconds", "histogram", "Arrival to first text", buckets=_SECONDS),
        Metric("llava", "vlm_relay_request_seconds", "histogram", "Arrival to the end of an answer", buckets=_SECONDS),
    )


def _clip_encoder() -> tuple[Metric, ...]:
    return (
        Metric("clip_encoder", "vlm_relay_encode_batch_images", "histogram", "Images encoded together", (), _BATCHES),
        Metric("clip_encoder", "vlm_relay_encode_seconds", "histogram", "Time of one encode batch", (), _SECONDS),
        Metric("clip_encoder", "vlm_relay_embedding_hits_total", "counter", "Images whose embedding was in the store"),
        Metric("clip_encoder", "vlm_relay_shared_cache_hits_total", "counter", "Images another server had encoded"),
        Metric("clip_encoder", "vlm_relay_embedding_misses_total", "counter", "Images that had to be encoded"),
        Metric("clip_encoder", "vlm_relay_embedding_evictions_total", "counter", "Embeddings given up for newer ones"),
        Metric("clip_encoder", "vlm_relay_embeddings", "gauge", "Embeddings in the store"),
        Metric("clip_encoder", "vlm_relay_embedding_slots", "gauge", "Embeddings that the store has room for"),
        Metric("clip_encoder", "vlm_relay_leases", "gauge", "Leases held on embeddings"),
    )


def _llava_decoder() -> tuple[Metric, ...]:
    stage: Stage = "llava_decoder"
    return (
        Metric(stage, "vlm_relay_running_sequences", "gauge", "Sequences in the decoder's batch"),
        Metric(stage, "vlm_relay_waiting_sequences", "gauge", "Sequences accepted and not yet running"),
        Metric(stage, "vlm_relay_free_kv_blocks", "gauge", "Free blocks of the KV cache"),
        Metric(stage, "vlm_relay_kv_cache_usage_ratio", "gauge", "Share of the KV cache that running sequences hold"),
        Metric(
            stage,
            "vlm_relay_decode_batch_sequences",
            "histogram",
            "Sequences that decoded a token in one step, of a step sampled four times a second",
            buckets=_BATCHES,
        ),
        Metric(stage, "vlm_relay_generated_tokens_total", "counter", "Tokens generated"),
        Metric(stage, "vlm_relay_prompt_tokens_total", "counter", "Prompt tokens taken in, image tokens among them"),
        Metric(stage, "vlm_relay_cached_prompt_tokens_total", "counter", "Prompt tokens found in the prefix cache"),
        Metric(stage, "vlm_relay_preemptions_total", "counter", "Sequences put back for want of KV blocks"),
        Metric(stage, "vlm_relay_transfer_seconds", "histogram", "Taking in a request's embeddings", (), _COPIES),
        Metric(
            stage,
            "vlm_relay_decode_wait_seconds",
            "histogram",
            "A sequence accepted to its first step",
            buckets=_SECONDS,
        ),
        Metric(stage, "vlm_relay_prefill_seconds", "histogram", "First step to first token", buckets=_SECONDS),
        Metric(
            stage,
            "vlm_relay_tpot_seconds",
            "histogram",
            "Time per token after the first, of a whole answer",
            buckets=_TOKEN_SECONDS,
        ),
        Metric(stage, "vlm_relay_embedding_copied_bytes_total", "counter", "Embeddings copied to this GPU", ("route",)),
        Metric(
            stage,
            "vlm_relay_embedding_copy_seconds",
            "histogram",
            "One such copy, by the GPU's clock",
            buckets=_COPIES,
        ),
    )


METRICS = {metric.name: metric for metric in (*_llava(), *_clip_encoder(), *_llava_decoder())}


class Meter(Protocol):
    """Takes observations; never blocks and never fails. Labels must be those of the metric's definition."""

    def add(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        """Raises a counter."""

    def set(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Sets a gauge."""

    def observe(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Adds a value to a histogram."""


class NoMeter:
    """Forgets everything: for commands and tests."""

    def add(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        """Nothing."""

    def set(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Nothing."""

    def observe(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Nothing."""
