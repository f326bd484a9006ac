"""The Grafana dashboard, written as rows of panels. Writes vlm-relay/files/dashboard.json.

    python deploy/helm/dashboard.py            # writes it
    python deploy/helm/dashboard.py --check    # exit status 1 when it is not what would be written

Each expression is run against a Prometheus that scraped a loaded server by
tests/integration/gateway/test_dashboard_on_prometheus.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("vlm-relay") / "files" / "dashboard.json"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
CHOSEN = 'namespace=~"$namespace",pod=~"$pod"'


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph: lines are expressions by legend. `unit` is Grafana's."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    text: str = ""


def per_s(name: str, by: str = "", where: str = "") -> str:
    """A counter's rate, summed over pods."""
    chosen = f"{CHOSEN},{where}" if where else CHOSEN
    return f"sum{f' by ({by}) ' if by else ''}(rate({name}{{{chosen}}}[$__rate_interval]))"


def now(name: str, by: str = "") -> str:
    """A gauge, summed over pods."""
    return f"sum{f' by ({by}) ' if by else ''}({name}{{{CHOSEN}}})"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """Median, 90th and 99th percentile of a histogram."""
    buckets = per_s(f"{name}_bucket", "le")
    return tuple(
        (label, f"histogram_quantile({share}, {buckets})")
        for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    )


def mean(name: str) -> str:
    """The average of a histogram."""
    return f"{per_s(f'{name}_sum')} / {per_s(f'{name}_count')}"


def share(part: str, whole: str) -> str:
    """A rate as part of the sum of two."""
    return f"{per_s(part)} / ({per_s(part)} + {per_s(whole)})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel("Ended, by outcome", "reqps", (("{{outcome}}", per_s("vlm_relay_requests_total", "outcome")),)),
        Panel(
            "Served and waiting",
            "short",
            (("served", now("vlm_relay_in_flight_requests")), ("waiting", now("vlm_relay_waiting_requests"))),
            "Waiting for long means: more replicas, or smaller limits upstream.",
        ),
        Panel("Gateway, by status", "reqps", (("{{status}}", per_s("vlm_relay_gateway_requests_total", "status")),)),
        Panel("Time to first token", "s", quantiles("vlm_relay_ttft_seconds")),
        Panel("Time per token after the first", "s", quantiles("vlm_relay_tpot_seconds")),
        Panel("Whole answers", "s", quantiles("vlm_relay_request_seconds")),
        Panel("Gateway: time to first token", "s", quantiles("vlm_relay_gateway_ttft_seconds")),
        Panel(
            "Gateway: clients gone, streams failed",
            "reqps",
            (
                ("clients gone", per_s("vlm_relay_gateway_disconnects_total")),
                ("streams failed", per_s("vlm_relay_gateway_stream_errors_total")),
            ),
        ),
        Panel(
            "Tokens per second",
            "short",
            (
                ("generated", per_s("vlm_relay_generated_tokens_total")),
                ("prompt", per_s("vlm_relay_prompt_tokens_total")),
            ),
        ),
    ),
    "Scheduler": (
        Panel(
            "Let in and rejected",
            "reqps",
            (
                ("let in", per_s("vlm_relay_admitted_total")),
                ("{{reason}}", per_s("vlm_relay_rejected_total", "reason")),
            ),
        ),
        Panel(
            "Wait for a place, p90",
            "s",
            (("{{priority}}", f"histogram_quantile(0.9, {per_s('vlm_relay_queue_seconds_bucket', 'le, priority')})"),),
        ),
        Panel(
            "Work before each replica",
            "short",
            (
                ("images {{replica}}", now("vlm_relay_pending_images", "replica")),
                ("tokens {{replica}}", now("vlm_relay_pending_tokens", "replica")),
            ),
        ),
        Panel("Decisions, by mode", "reqps", (("{{mode}}", per_s("vlm_relay_decisions_total", "mode")),)),
        Panel("Decisions, by reason", "reqps", (("{{reason}}", per_s("vlm_relay_decisions_total", "reason")),)),
        Panel(
            "Deaths, recoveries, retries (10 min)",
            "short",
            (
                ("{{replica}} died", f"sum by (replica) (increase(vlm_relay_deaths_total{{{CHOSEN}}}[10m]))"),
                ("{{replica}} came back", f"sum by (replica) (increase(vlm_relay_recoveries_total{{{CHOSEN}}}[10m]))"),
                ("retries", f"sum(increase(vlm_relay_retries_total{{{CHOSEN}}}[10m]))"),
            ),
        ),
    ),
    "Encoders": (
        Panel("Time of a batch", "s", quantiles("vlm_relay_encode_seconds")),
        Panel("Images in a batch", "short", (("mean", mean("vlm_relay_encode_batch_images")),)),
        Panel(
            "Embedding cache: hits",
            "percentunit",
            (("hits", share("vlm_relay_embedding_hits_total", "vlm_relay_embedding_misses_total")),),
        ),
        Panel(
            "Embeddings and leases",
            "short",
            (
                ("slots {{model}}", now("vlm_relay_embedding_slots", "model")),
                ("embeddings {{model}}", now("vlm_relay_embeddings", "model")),
                ("leases {{model}}", now("vlm_relay_leases", "model")),
            ),
            "Leases near the slots mean: decoders do not keep up, or slots are too few.",
        ),
        Panel(
            "Bytes per link",
            "Bps",
            (("{{encoder}} to {{decoder}}", per_s("vlm_relay_transferred_bytes_total", "encoder, decoder")),),
        ),
        Panel("Taking in embeddings", "s", quantiles("vlm_relay_transfer_seconds")),
        Panel("Embeddings given up", "reqps", (("evictions", per_s("vlm_relay_embedding_evictions_total")),)),
    ),
    "Decoders": (
        Panel(
            "Sequences",
            "short",
            (
                ("running {{model}}", now("vlm_relay_running_sequences", "model")),
                ("waiting {{model}}", now("vlm_relay_waiting_sequences", "model")),
            ),
        ),
        Panel(
            "KV cache in use", "percentunit", (("{{pod}} {{model}}", f"vlm_relay_kv_cache_usage_ratio{{{CHOSEN}}}"),)
        ),
        Panel("Sequences in a step", "short", (("mean", mean("vlm_relay_decode_batch_sequences")),)),
        Panel("Wait for the first step", "s", quantiles("vlm_relay_decode_wait_seconds")),
        Panel("Prefill", "s", quantiles("vlm_relay_prefill_seconds")),
        Panel(
            "Prompt tokens found in the cache",
            "percentunit",
            (
                (
                    "cached",
                    f"{per_s('vlm_relay_cached_prompt_tokens_total')} / {per_s('vlm_relay_prompt_tokens_total')}",
                ),
            ),
        ),
        Panel("Sequences put back", "reqps", (("preemptions", per_s("vlm_relay_preemptions_total")),)),
        Panel("Free KV blocks", "short", (("{{pod}} {{model}}", f"vlm_relay_free_kv_blocks{{{CHOSEN}}}"),)),
    ),
    "GPUs": (
        Panel("Utilisation", "percentunit", (("{{pod}} {{gpu_uuid}}", f"nv_gpu_utilization{{{CHOSEN}}}"),)),
        Panel("Memory in use", "bytes", (("{{pod}} {{gpu_uuid}}", f"nv_gpu_memory_used_bytes{{{CHOSEN}}}"),)),
        Panel(
            "Embeddings copied between devices",
            "Bps",
            (("{{route}}", per_s("vlm_relay_embedding_copied_bytes_total", "route")),),
        ),
        Panel("Time of a copy", "s", quantiles("vlm_relay_embedding_copy_seconds")),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's form."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []})
        panels[-1]["gridPos"] = {"x": 0, "y": top, "w": WIDTH * COLUMNS, "h": 1}
        top += 1
        for place, panel in enumerate(row):
            grid = {"x": place % COLUMNS * WIDTH, "y": top + place // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": grid, **_graph(panel)})
        top += -(-len(row) // COLUMNS) * HEIGHT
    return {
        "uid": "vlm-relay",
        "title": "vlm-relay",
        "tags": ["vlm-relay"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _variable("namespace"), _variable("pod", 'namespace=~"$namespace"')]},
        "panels": panels,
    }


def _graph(panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": chr(ord("A") + place), "datasource": source, "expr": expression, "legendFormat": legend}
        for place, (legend, expression) in enumerate(panel.lines)
    ]
    custom = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(label: str, where: str = "") -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": f'label_values({{__name__=~"vlm_relay_.*"{"," if where else ""}{where}}}, {label})',
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def main(arguments: list[str]) -> int:
    """Writes or checks the file; the exit status."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    is_written = TARGET.exists() and TARGET.read_text() == text
    if "--check" in arguments and not is_written:
        print(f"{TARGET.name}: not what the rows say; run 'python {sys.argv[0]}'", file=sys.stderr)
        return 1
    if not is_written:
        TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
