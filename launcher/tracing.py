"""Triton's part of a trace: its request span, and the context that the models' spans hang on.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318   where spans go, by OTLP/HTTP; unset: no traces
    OTEL_TRACES_SAMPLER_ARG=0.01                        share of the requests without a context that are traced

A request that brings a `traceparent` is traced whatever the share: whoever sent it has decided.
"""

from __future__ import annotations

import importlib.util
import urllib.parse
from collections.abc import Mapping

COLLECTOR, RATIO = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER_ARG"
SERVICE = "vlm-relay-server"


def trace_flags(variables: Mapping[str, str]) -> list[str]:
    """Flags for tritonserver's command line; none without a collector.

    Raises:
        ValueError: the address, the share, or the extra `tracing` is wrong or missing.
    """
    endpoint = variables.get(COLLECTOR, "")
    if not endpoint:
        return []
    url = urllib.parse.urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{COLLECTOR}: must be http://host:port of a collector, not {endpoint!r}")
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        raise ValueError(f"{COLLECTOR} is set, but opentelemetry-sdk is missing: pip install 'vlm-relay[tracing]'")
    rate = _one_in(variables.get(RATIO, "1"))
    settings = (
        "level=TIMESTAMPS",
        f"rate={rate}",
        "mode=opentelemetry",
        f"opentelemetry,url={endpoint.rstrip('/')}/v1/traces",
        f"opentelemetry,resource=service.name={SERVICE}",
    )
    return [f"--trace-config={setting}" for setting in settings]


def _one_in(ratio: str) -> int:
    """Triton traces one request in so many; 0: only those that bring a context."""
    try:
        share = float(ratio)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{RATIO}: must be 0 to 1, not {ratio!r}")
    return 0 if share == 0 else round(1 / share)
