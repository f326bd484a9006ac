"""Figures from the file that perf_analyzer exports; pure.

Its own printed latencies of a streamed, decoupled model are those of whole answers even where they say first
response, and its counts miss the warm-up; every figure here comes from the exported timestamps.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

NS_PER_MS, NS_PER_S = 1e6, 1e9


class ExportRefused(ValueError):
    """Not a file that perf_analyzer exported, or one with nothing in it."""


@dataclass(frozen=True, slots=True)
class Level:
    """What clients saw at one number of requests in flight. TTFT is time to the first response with text."""

    concurrency: int
    num_requests: int
    num_without_text: int  # refused or failed
    ttft_p50_ms: float
    ttft_p90_ms: float
    latency_p50_ms: float
    latency_p90_ms: float
    between_p50_ms: float  # between two responses of one stream
    requests_per_s: float
    responses_per_s: float

    def to_dict(self) -> dict[str, int | float]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Request:
    start_ns: int
    end_ns: int
    texts_ns: tuple[int, ...]  # when text came; a busy server gathers a whole answer into one response


def read_levels(path: Path) -> list[Level]:
    """The figures of every level of concurrency in an exported file.

    Raises:
        ExportRefused: there are none.
    """
    try:
        experiments = json.loads(path.read_text())["experiments"]
        levels = [
            _level(
                int(experiment["experiment"]["value"]),
                [_request(entry) for entry in experiment["requests"] if entry["response_timestamps"]],
            )
            for experiment in experiments
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ExportRefused(f"{path}: {error}") from error
    if not levels:
        raise ExportRefused(f"{path}: no experiment in it")
    return levels


def table(levels: list[Level]) -> str:
    """The figures as lines of text."""
    head = f"{'in flight':>9}{'requests':>10}{'TTFT p50/p90 ms':>20}{'latency p50/p90 ms':>22}"
    lines = [f"{head}{'between ms':>12}{'requests/s':>12}{'responses/s':>13}"]
    for level in levels:
        ttft = f"{level.ttft_p50_ms:.1f} / {level.ttft_p90_ms:.1f}"
        latency = f"{level.latency_p50_ms:.1f} / {level.latency_p90_ms:.1f}"
        lines.append(
            f"{level.concurrency:>9}{level.num_requests:>10}{ttft:>20}{latency:>22}{level.between_p50_ms:>12.2f}"
            f"{level.requests_per_s:>12.1f}{level.responses_per_s:>13.1f}"
        )
    return "\n".join(lines)


def _request(entry: dict[str, Any]) -> _Request:
    times, outputs = entry["response_timestamps"], entry["response_outputs"]
    texts = tuple(time for time, output in zip(times, outputs, strict=True) if _has_text(output))
    return _Request(entry["timestamp"], times[-1], texts)


def _has_text(output: dict[str, str]) -> bool:
    """Whether a response says something: over gRPC its `text_output`, over HTTP the content of its events."""
    if "response" not in output:
        return bool(output.get("text_output"))
    events = [line[6:] for line in output["response"].splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices", ())]
    return any(choice["delta"].get("content") for choice in choices)


def _level(concurrency: int, requests: list[_Request]) -> Level:
    if not requests:
        raise ExportRefused(f"no request at concurrency {concurrency}")
    answered = [request for request in requests if request.texts_ns]
    if not answered:
        raise ExportRefused(f"none of {len(requests)} requests at concurrency {concurrency} was answered with text")
    ttft = [(request.texts_ns[0] - request.start_ns) / NS_PER_MS for request in answered]
    latency = [(request.end_ns - request.start_ns) / NS_PER_MS for request in answered]
    texts = [request.texts_ns for request in answered]
    between = np.concatenate([np.diff(times) for times in texts]) / NS_PER_MS
    began = min(request.start_ns for request in requests)
    seconds = (max(request.end_ns for request in answered) - began) / NS_PER_S
    return Level(
        concurrency=concurrency,
        num_requests=len(requests),
        num_without_text=len(requests) - len(answered),
        ttft_p50_ms=_quantile(ttft, 50),
        ttft_p90_ms=_quantile(ttft, 90),
        latency_p50_ms=_quantile(latency, 50),
        latency_p90_ms=_quantile(latency, 90),
        between_p50_ms=_quantile(between.tolist(), 50) if between.size else 0.0,
        requests_per_s=round(len(answered) / seconds, 2),
        responses_per_s=round(sum(len(times) for times in texts) / seconds, 2),
    )


def _quantile(values: list[float], percent: int) -> float:
    return round(float(np.percentile(values, percent)), 3)
