"""What the engine gives, sent on: to the scheduler over its socket, to anybody else in Triton's responses."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.decoder.sequence import Delta, RankedToken, TokenLogprob
from python_backend.errors import RelayError
from python_backend.metrics import Meter
from python_backend.models.adapter import text_tensor
from python_backend.stream import ERROR
from python_backend.token_link import Line, TokenSender

logger = logging.getLogger(__name__)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


Send = Callable[[Line, bool], None]
"""Sends a line (token_ids, text, finish_reason, and a report where there is one); true: it is the last."""


def to_caller(sender: Any) -> Send:
    """To whoever called this model: a line is a response."""
    return lambda line, is_last: sender.send(_response(line), flags=FINAL if is_last else 0)


def to_scheduler(link: TokenSender, request_id: str) -> Send:
    """To the scheduler, over its socket."""
    return lambda line, _: link.send({"request_id": request_id, **line})


class DeltaSender:
    """Sends what the engine gave, from a thread of its own, so that a slow hop never holds up a step.

    What gathers for one request while others are served goes out as one response.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._ready: deque[_Outbox | None] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="sender", daemon=True)
        self._thread.start()

    def stream(self, send: Send, transfer: Mapping[str, float]) -> _Outbox:
        """Takes the deltas of one request; call it with each. `transfer` goes into its report."""
        return _Outbox(self, send, transfer)

    def put(self, outbox: _Outbox, delta: Delta) -> None:
        """Queues a delta. Called by the engine; never blocks for long."""
        with self._wake:
            if not outbox.deltas:
                self._ready.append(outbox)
            outbox.deltas.append(delta)
            self._wake.notify()

    def close(self) -> None:
        """Sends what is queued and ends the thread."""
        with self._wake:
            self._ready.append(None)
            self._wake.notify()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._ready:
                    self._wake.wait()
                outbox = self._ready.popleft()
                if outbox is None:
                    return
                deltas, outbox.deltas = outbox.deltas, []
            try:
                outbox.send(_line(deltas, outbox.transfer), deltas[-1].is_final)
            except OSError as error:
                logger.warning("the scheduler is gone: %s", error)
            except Exception:  # one request's answer is lost; the others must go on
                logger.exception("a response could not be sent")


class _Outbox:
    """One request's unsent deltas, guarded by its sender's condition."""

    def __init__(self, owner: DeltaSender, send: Send, transfer: Mapping[str, float]) -> None:
        self._owner = owner
        self.send = send
        self.transfer = transfer
        self.deltas: list[Delta] = []
        self._num_tokens = 0

    def __call__(self, delta: Delta) -> None:
        self._note(delta)
        self._owner.put(self, delta)

    def _note(self, delta: Delta) -> None:
        """Counts how long the request waited, its prompt took, and then each token."""
        times, meter = delta.times, self._owner.meter
        is_first = self._num_tokens == 0 and bool(delta.token_ids)
        self._num_tokens += len(delta.token_ids)
        if times.started_s is None or times.first_token_s is None:
            return
        if is_first:
            meter.observe("vlm_relay_decode_wait_seconds", times.started_s - times.accepted_s)
            meter.observe("vlm_relay_prefill_seconds", times.first_token_s - times.started_s)
        if delta.finish_reason is not None and self._num_tokens > 1:
            seconds = time.monotonic() - times.first_token_s
            meter.observe("vlm_relay_tpot_seconds", seconds / (self._num_tokens - 1))


def _line(deltas: list[Delta], transfer: Mapping[str, float]) -> dict[str, Any]:
    """Deltas of one request, joined."""
    last = deltas[-1]
    if last.error is not None:
        return _error_line(last.error)
    line: dict[str, Any] = {
        "token_ids": [token_id for delta in deltas for token_id in delta.token_ids],
        "text": "".join(delta.text for delta in deltas),
        "finish_reason": last.finish_reason or "",
    }
    logprobs = [_logprob(item) for delta in deltas for item in delta.logprobs]
    if logprobs or last.is_final:
        line["report"] = {
            "num_prompt_tokens": last.num_prompt_tokens,
            "num_cached_tokens": last.num_cached_tokens,
            "cumulative_logprob": last.cumulative_logprob,
            "logprobs": logprobs,
            **transfer,
            "times": _times(last, transfer["landed_s"]),
        }
    return line


def _times(delta: Delta, landed_s: float) -> dict[str, float]:
    """When the request's embeddings were in place, its first step began, its first and last token came."""
    told = {"landed_s": landed_s, **asdict(delta.times)}
    return {name: value for name, value in told.items() if value is not None}


def _error_line(error: RelayError) -> dict[str, Any]:
    return {"token_ids": [], "text": "", "finish_reason": ERROR, "report": {"error": str(error)}}


def refuse(sender: Any, error: RelayError) -> None:
    """Ends a call with an error, told in an ordinary response.

    Triton's own errors get lost between two models (2.51, decoupled): the caller's iterator then ends as if nothing
    was wrong, or never, and its thread with it.
    """
    to_caller(sender)(_error_line(error), True)


def _response(line: Line) -> Any:
    outputs = [
        pb_utils.Tensor("token_ids", np.array(line["token_ids"], dtype=np.int32)),
        text_tensor("text", line["text"]),
        text_tensor("finish_reason", line["finish_reason"]),
    ]
    if "report" in line:
        outputs.append(text_tensor("report", json.dumps(line["report"])))
    return pb_utils.InferenceResponse(outputs)


def _logprob(item: TokenLogprob) -> dict[str, object]:
    """In the form of Triton's vLLM backend: token id to log-probability, rank and text."""
    chosen = RankedToken(item.token_id, item.logprob, item.rank, item.text)
    return {
        str(token.token_id): {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text}
        for token in (chosen, *item.top)
    }
