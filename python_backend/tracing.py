"""Spans of requests to an OpenTelemetry collector, from a thread of its own.

Only requests that Triton traces have a context; for all others nothing is done. The exporter's packages
(the extra `tracing`) are imported at the first traced request, and read their address from the environment
(`OTEL_EXPORTER_OTLP_ENDPOINT`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from python_backend.timeline import Attribute, Span, Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
MAX_QUEUED = 2048  # traces; a collector that does not answer loses the rest


class Tracer(Protocol):
    """Takes finished requests; never blocks and never fails."""

    def ended(self, context: str, timeline: Timeline, attributes: Mapping[str, Attribute]) -> None:
        """Exports the spans of a request below the span of `context`, a W3C traceparent."""


class NoTracer:
    """Exports nothing."""

    def ended(self, context: str, timeline: Timeline, attributes: Mapping[str, Attribute]) -> None:
        """Nothing."""


class SpanExporter:
    """A `Tracer` that sends to a collector by OTLP/HTTP."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._queue: queue.Queue[tuple[str, Span, list[Span]] | None] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._wall_ns = time.time_ns() - time.monotonic_ns()  # of the monotonic clock's zero

    def ended(self, context: str, timeline: Timeline, attributes: Mapping[str, Attribute]) -> None:
        """Queues the spans; drops them when the queue is full."""
        request = Span("request", timeline.arrived_s, time.monotonic(), attributes)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tracing", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait((context, request, list(timeline.spans)))
        except queue.Full:
            logger.debug("a trace is dropped: the collector does not keep up")

    def close(self) -> None:
        """Sends what is queued and ends the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        try:
            provider = _provider(self._service)
        except ModuleNotFoundError as error:
            logger.error("no traces: %s is missing, install the extra 'tracing'", error.name)
            return
        while (item := self._queue.get()) is not None:
            try:
                self._export(provider, *item)
            except Exception:  # a trace must never take the model down
                logger.exception("a trace could not be exported")
        provider.shutdown()

    def _export(self, provider: TracerProvider, context: str, request: Span, parts: list[Span]) -> None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        tracer = provider.get_tracer("vlm-relay")
        above = TraceContextTextMapPropagator().extract({"traceparent": context})
        whole = tracer.start_span(
            request.name, above, attributes=dict(request.attributes), start_time=self._ns(request.began_s)
        )
        below = set_span_in_context(whole)
        for part in parts:
            span = tracer.start_span(
                part.name, below, attributes=dict(part.attributes), start_time=self._ns(part.began_s)
            )
            span.end(self._ns(part.ended_s))
        whole.end(self._ns(request.ended_s))

    def _ns(self, monotonic_s: float) -> int:
        """The wall clock's time of a monotonic one, as spans want it."""
        return self._wall_ns + int(monotonic_s * 1e9)


def _provider(service: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    # Which requests are traced was decided before: those without a context never come here.
    provider = TracerProvider(
        sampler=ALWAYS_ON, resource=Resource.create({"service.name": service}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=1000))
    return provider
