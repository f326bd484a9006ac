"""From the environment to Triton's trace flags."""

from __future__ import annotations

import pytest

from launcher.tracing import trace_flags

COLLECTOR = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}


def test_without_a_collector_nothing_is_traced() -> None:
    assert trace_flags({}) == []


@pytest.mark.parametrize(("share", "rate"), [("1", "1"), ("0.01", "100"), ("0.3", "3"), ("0", "0")])
def test_triton_traces_one_request_in_so_many(share: str, rate: str) -> None:
    flags = trace_flags({**COLLECTOR, "OTEL_TRACES_SAMPLER_ARG": share})

    assert flags == [
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={rate}",
        "--trace-config=mode=opentelemetry",
        "--trace-config=opentelemetry,url=http://collector:4318/v1/traces",
        "--trace-config=opentelemetry,resource=service.name=vlm-relay-server",
    ]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"},
            "OTEL_EXPORTER_OTLP_ENDPOINT: must be http://host:port of a collector, not 'collector:4318'",
        ),
        ({**COLLECTOR, "OTEL_TRACES_SAMPLER_ARG": "half"}, "OTEL_TRACES_SAMPLER_ARG: must be 0 to 1, not 'half'"),
        ({**COLLECTOR, "OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG: must be 0 to 1, not '2'"),
    ],
)
def test_a_wrong_variable_is_named_with_what_is_allowed(variables: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match="OTEL_") as refused:
        trace_flags(variables)
    assert str(refused.value) == told
