"""The metrics of the serving side: their names, kinds and meaning, in one table.

Whoever has something to count holds a `Meter`; only `models/metrics.py` knows Triton's metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_COPIES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_BATCHES = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. `buckets` are upper bounds, for histograms only."""

    name: str
    kind: Kind
    text: str
    buckets: tuple[float, ...] = ()


METRICS = {
    metric.name: metric
    for metric in (
        # llava
        Metric("vlm_relay_requests_total", "counter", "Requests ended, by outcome (ok or the error's code)"),
        Metric("vlm_relay_in_flight_requests", "gauge", "Requests being served"),
        Metric("vlm_relay_waiting_requests", "gauge", "Requests admitted and waiting for a place"),
        Metric("vlm_relay_decisions_total", "counter", "Placements, by mode and kind of reason"),
        Metric("vlm_relay_deaths_total", "counter", "Stage processes that died, by replica"),
        Metric("vlm_relay_recoveries_total", "counter", "Stage processes restarted, by replica"),
        Metric("vlm_relay_retries_total", "counter", "Requests tried again because a stage died"),
        Metric("vlm_relay_ttft_seconds", "histogram", "Arrival to first text", _SECONDS),
        Metric("vlm_relay_request_seconds", "histogram", "Arrival to the end of an answered request", _SECONDS),
        # clip_encoder
        Metric("vlm_relay_encode_batch_images", "histogram", "Images encoded together", _BATCHES),
        Metric("vlm_relay_encode_seconds", "histogram", "Time of one encode batch", _SECONDS),
        Metric("vlm_relay_embedding_hits_total", "counter", "Images whose embedding was in the store"),
        Metric("vlm_relay_embedding_misses_total", "counter", "Images that had to be encoded"),
        Metric("vlm_relay_leases", "gauge", "Leases out on slots of the embedding store, after the last batch"),
        # llava_decoder
        Metric("vlm_relay_running_sequences", "gauge", "Sequences in the decoder's batch"),
        Metric("vlm_relay_waiting_sequences", "gauge", "Sequences accepted and not yet running"),
        Metric("vlm_relay_free_kv_blocks", "gauge", "Free blocks of the KV cache"),
        Metric("vlm_relay_decode_batch_sequences", "histogram", "Sequences that decoded a token in one step", _BATCHES),
        Metric("vlm_relay_generated_tokens_total", "counter", "Tokens generated"),
        Metric("vlm_relay_embedding_copied_bytes_total", "counter", "Embeddings copied to this GPU, by route"),
        Metric("vlm_relay_embedding_copy_seconds", "histogram", "One such copy, by the GPU's clock", _COPIES),
    )
}


class Meter(Protocol):
    """Takes observations; never blocks and never fails."""

    def add(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        """Raises a counter."""

    def set(self, name: str, value: float) -> None:
        """Sets a gauge."""

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""


class NoMeter:
    """Forgets everything: for commands and tests."""

    def add(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        """Nothing."""

    def set(self, name: str, value: float) -> None:
        """Nothing."""

    def observe(self, name: str, value: float) -> None:
        """Nothing."""
