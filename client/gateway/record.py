"""One completion as the operator sees it: its line in the log, its metrics, its row in the live panel."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping

from client.answer import Answer, Progress
from client.gateway.events import Events
from client.gateway.failure import Failure
from client.gateway.metrics import GatewayMetrics
from client.gateway.question import Question
from client.gateway.tracing import CompletionSpan

logger = logging.getLogger(__name__)

NEWS_S = 0.25  # between two words about one growing answer


class Record:
    """Follows one completion from its arrival to its end; owned by its response. `end` it exactly once."""

    _serials = itertools.count(1)

    def __init__(
        self,
        request_id: str,
        question: Question,
        metrics: GatewayMetrics,
        events: Events,
        clock: Callable[[], float],
        span: CompletionSpan,
    ) -> None:
        self._key = f"{next(Record._serials)}"  # clients may use a request id twice
        self._request_id = request_id
        self._question = question
        self._metrics = metrics
        self._events = events
        self._clock = clock
        self._span = span
        self._began_s = clock()
        self._told_s = self._began_s
        self._first_s: float | None = None
        self._decision: Mapping[str, object] | None = None
        metrics.in_flight.inc()
        self._tell("waiting", None)

    def note_progress(self, progress: Progress) -> None:
        """The server has placed the request, or its images are encoded."""
        self._decision = progress.decision or self._decision
        is_encoding = progress.stage == "placed" and bool(self._question.images)
        self._tell("encoding" if is_encoding else "prefilling", None)

    def note_first(self, answer: Answer) -> None:
        """The first token has come."""
        self._first_s = self._clock()
        self._metrics.ttft_s.observe(self._first_s - self._began_s)
        self._span.note("first token")
        self._tell("answering", answer)

    @property
    def wants_news(self) -> bool:
        """Whether somebody watches, and was told nothing of this answer for a while."""
        return self._events.has_watchers and self._clock() - self._told_s >= NEWS_S

    def note_news(self, answer: Answer) -> None:
        """More of the answer has come."""
        self._tell("answering", answer)

    def end(self, answer: Answer, failure: Failure | None, is_disconnect: bool) -> None:
        """Nothing more will come: answered, failed, or left by its client."""
        total_s = self._clock() - self._began_s
        self._metrics.in_flight.dec()
        self._metrics.tokens.labels("prompt").inc(answer.num_input_tokens)
        self._metrics.tokens.labels("completion").inc(answer.num_output_tokens)
        if is_disconnect:
            state = "left"
            self._metrics.disconnects.inc()
        elif failure is not None:
            state = "failed"
            self._metrics.stream_errors.inc(0 if self._first_s is None else 1)
        else:
            state = "answered"
            self._metrics.request_s.observe(total_s)
        self._tell(state, answer, failure)
        told = {"vlm_relay.tokens_in": answer.num_input_tokens, "vlm_relay.tokens_out": answer.num_output_tokens}
        self._span.end({"vlm_relay.state": state, **told}, None if failure is None else failure.message)
        logger.info(
            "%s %s in %.3f s, %d tokens in, %d out, first after %s",
            self._request_id,
            state if failure is None else f"{state} with {failure.status}: {failure.message}",
            total_s,
            answer.num_input_tokens,
            answer.num_output_tokens,
            "-" if self._first_s is None else f"{self._first_s - self._began_s:.3f} s",
        )

    def _tell(self, state: str, answer: Answer | None, failure: Failure | None = None) -> None:
        self._told_s = self._clock()
        rate = None if answer is None else answer.output_tokens_per_s
        if answer is not None and answer.decision is not None:
            self._decision = answer.decision
        self._events.tell_request(
            self._key,
            {
                "key": self._key,
                "request_id": self._request_id,
                "state": state,
                "num_images": len(self._question.images),
                "decision": self._decision,
                "ttft_ms": None if self._first_s is None else round((self._first_s - self._began_s) * 1000, 1),
                "num_input_tokens": 0 if answer is None else answer.num_input_tokens,
                "num_output_tokens": 0 if answer is None else answer.num_output_tokens,
                "tokens_per_s": None if rate is None else round(rate, 1),
                "error": None if failure is None else failure.message,
            },
        )
