"""The gateway's span of a completion, above the server's: OpenTelemetry, if there is a collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SERVICE = "vlm-relay-gateway"


class CompletionSpan(Protocol):
    """One completion in a trace."""

    @property
    def traceparent(self) -> str:
        """What the server is told, a W3C trace context; empty: nothing."""

    def note(self, event: str) -> None:
        """Marks a moment."""

    def end(self, attributes: Mapping[str, str | int], error: str | None) -> None:
        """The completion is over."""


class Traces(Protocol):
    """Makes spans."""

    def begin(self, name: str, traceparent: str, attributes: Mapping[str, str | int]) -> CompletionSpan:
        """A span below the client's context, or the beginning of a trace where there is none."""

    def close(self) -> None:
        """Sends what is left."""


class PassedOn:
    """No span: the client's context goes to the server as it came."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def note(self, event: str) -> None:
        """Nothing."""

    def end(self, attributes: Mapping[str, str | int], error: str | None) -> None:
        """Nothing."""


class NoTraces:
    """Without a collector."""

    def begin(self, name: str, traceparent: str, attributes: Mapping[str, str | int]) -> CompletionSpan:
        """No span."""
        return PassedOn(traceparent)

    def close(self) -> None:
        """Nothing."""


class ExportedTraces:
    """Spans that go to a collector by OTLP/HTTP, from a thread of the exporter's.

    Address, sampler and its ratio are read from the environment by the packages themselves:
    `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, `OTEL_TRACES_SAMPLER_ARG`.

    Raises:
        ModuleNotFoundError: the extra `tracing` is not installed.
    """

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider: TracerProvider = TracerProvider(
            resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=1000))

    def begin(self, name: str, traceparent: str, attributes: Mapping[str, str | int]) -> CompletionSpan:
        """A span; without one (not sampled) the server is told nothing, either."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract({"traceparent": traceparent} if traceparent else {})
        span = self._provider.get_tracer(SERVICE).start_span(name, above, SpanKind.SERVER, dict(attributes))
        return _Exported(span) if span.get_span_context().trace_flags.sampled else PassedOn("")

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class _Exported:
    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def note(self, event: str) -> None:
        self._span.add_event(event)

    def end(self, attributes: Mapping[str, str | int], error: str | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()
