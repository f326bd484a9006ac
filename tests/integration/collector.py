"""A collector of traces: takes OTLP/HTTP in both of its forms, JSON from Triton and protobuf from the SDK."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class CollectedSpan:
    """One span as it came; ids in hexadecimal, times in seconds of the wall clock."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began_s: float
    ended_s: float
    attributes: dict[str, Any]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s


class Collector:
    """Listens on a free port of 127.0.0.1 and keeps all spans."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                collector.spans += _spans(body, self.headers.get("Content-Type", ""))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *values: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def named(self, name: str, trace: str | None = None) -> list[CollectedSpan]:
        """The spans of a name, of one trace or all."""
        return [span for span in list(self.spans) if span.name == name and trace in (None, span.trace)]

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


def _spans(body: bytes, content_type: str) -> list[CollectedSpan]:
    if "json" in content_type:
        told = json.loads(body)
    else:
        message = ExportTraceServiceRequest.FromString(body)
        told = json_format.MessageToDict(message)
        _ids_to_hex(told)
    return [
        CollectedSpan(
            service=_attributes(resource["resource"]).get("service.name", ""),
            name=span["name"],
            trace=span["traceId"].lower(),
            id=span["spanId"].lower(),
            parent=span.get("parentSpanId", "").lower(),
            began_s=int(span["startTimeUnixNano"]) / 1e9,
            ended_s=int(span["endTimeUnixNano"]) / 1e9,
            attributes=_attributes(span),
        )
        for resource in told["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _ids_to_hex(told: dict[str, Any]) -> None:
    """Protobuf's own JSON has bytes as base64, OTLP's as hexadecimal."""
    import base64

    for resource in told["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in span:
                        span[key] = base64.b64decode(span[key]).hex()


def _attributes(told: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values()), None) for each in told.get("attributes", [])}
