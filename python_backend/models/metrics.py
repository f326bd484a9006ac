"""Triton's custom metrics behind one thread.

Triton's metric objects are not thread-safe: two threads that raise one counter crash the server itself. So
everybody else only puts an observation in a queue, and the one thread here owns every metric object.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from python_backend.metrics import METRICS, Stage

logger = logging.getLogger(__name__)

POLL_S = 0.25


class TritonMeter:
    """A `Meter` whose observations appear on Triton's `/metrics`, labelled with the model's name.

    Metrics without labels of their own are there from the start: an alert sees the first event, too.
    """

    def __init__(self, model: str, stage: Stage) -> None:
        self._model = model
        self._queue: queue.SimpleQueue[tuple[str | None, str, float, dict[str, str]] | None] = queue.SimpleQueue()
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._polls: list[Callable[[], None]] = []
        for metric in METRICS.values():
            if metric.stage == stage and not metric.labels:
                self._queue.put((None, metric.name, 0.0, {}))
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def add(self, name: str, amount: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        """Raises a counter."""
        self._queue.put(("increment", name, amount, dict(labels or {})))

    def set(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Sets a gauge."""
        self._queue.put(("set", name, value, dict(labels or {})))

    def observe(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Adds a value to a histogram."""
        self._queue.put(("observe", name, value, dict(labels or {})))

    def poll(self, report: Callable[[], None]) -> None:
        """Calls `report` a few times a second on the metrics thread; it may use this meter."""
        self._polls.append(report)

    def close(self) -> None:
        """Ends the thread after what is queued."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _work(self) -> None:
        due_s = time.monotonic() + POLL_S
        while True:
            now_s = time.monotonic()
            if now_s >= due_s:
                due_s = now_s + POLL_S
                for report in list(self._polls):
                    report()
            try:
                item = self._queue.get(timeout=max(0.0, due_s - now_s))
            except queue.Empty:
                continue
            if item is None:
                return
            verb, name, value, labels = item
            try:
                metric = self._metric(name, labels)
                if verb is not None:
                    getattr(metric, verb)(value)
            except Exception:  # a metric must never take the model down
                logger.exception("metric %s", name)

    def _metric(self, name: str, labels: dict[str, str]) -> Any:
        key = (name, tuple(sorted(labels.items())))
        if key not in self._metrics:
            definition = METRICS[name]
            if name not in self._families:
                kind = getattr(pb_utils.MetricFamily, definition.kind.upper())
                self._families[name] = pb_utils.MetricFamily(name=name, description=definition.text, kind=kind)
            options = {"buckets": list(definition.buckets)} if definition.buckets else {}
            self._metrics[key] = self._families[name].Metric(labels={"model": self._model, **labels}, **options)
        return self._metrics[key]
