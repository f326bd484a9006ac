"""The server's gauges, read from Triton's metrics port while somebody watches."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from client.gateway.events import Events

READ_TIMEOUT_S = 2.0
SHOWN = (
    "vlm_relay_in_flight_requests",
    "vlm_relay_waiting_requests",
    "vlm_relay_running_sequences",
    "vlm_relay_waiting_sequences",
    "vlm_relay_kv_cache_usage_ratio",
    "vlm_relay_embedding_slots",
    "vlm_relay_embedding_hits_total",
    "vlm_relay_embedding_misses_total",
    "vlm_relay_generated_tokens_total",
    "vlm_relay_leases",
    "vlm_relay_deaths_total",
    "vlm_relay_recoveries_total",
)


def gauges_from(text: str) -> dict[str, dict[str, float]]:
    """The shown metrics by replica and name, each summed over its samples.

    The replica is the label `replica` where a sample has it, else `model`; `llava` is the scheduler itself.

    Raises:
        ValueError: not Prometheus' text form.
    """
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in SHOWN:
                replica = sample.labels.get("replica") or sample.labels.get("model", "")
                values = found.setdefault(replica, {})
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return found


async def tell_gauges(url: str, every_s: float, events: Events) -> None:
    """Until cancelled, tells the watchers the gauges; a server that does not answer has none."""
    while True:
        if events.has_watchers:
            gauges: dict[str, dict[str, float]] = {}
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                gauges = gauges_from(await asyncio.to_thread(_read, url))
            events.tell_gauges(gauges)
        await asyncio.sleep(every_s)


def _read(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is near
    with opener.open(url, timeout=READ_TIMEOUT_S) as response:
        return str(response.read().decode())
