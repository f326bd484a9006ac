"""The gateway's own metrics; the server's are on Triton's port.

`deploy/metrics.md` says what they mean; a test compares it with a running gateway.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge beside each counter that says when the gateway started

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """The counters of one gateway; used by its event loop only."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        prefix = "vlm_relay_gateway"
        self.requests = Counter(
            f"{prefix}_requests", "HTTP requests, by endpoint and status", ["endpoint", "status"], registry=registry
        )
        self.disconnects = Counter(
            f"{prefix}_disconnects", "Clients gone before their answer was complete", registry=registry
        )
        self.stream_errors = Counter(
            f"{prefix}_stream_errors", "Streams that failed after their 200", registry=registry
        )
        self.in_flight = Gauge(f"{prefix}_in_flight_requests", "Completions being answered", registry=registry)
        self.ttft_s = Histogram(f"{prefix}_ttft_seconds", "Arrival to first token", buckets=_SECONDS, registry=registry)
        self.request_s = Histogram(
            f"{prefix}_request_seconds", "Arrival to the end of the answer", buckets=_SECONDS, registry=registry
        )
        self.tokens = Counter(f"{prefix}_tokens", "Tokens, by direction", ["direction"], registry=registry)

    def text(self) -> bytes:
        """Everything in Prometheus' text form."""
        return generate_latest(self._registry)
