"""The life of a request: admitted, attempted, tried again, ended; and the watch over all of them.

    accept ─▶ waiting room ─▶ one thread each: tokens ─▶ encode ─▶ decode ─▶ reply, reply, final
                  │                               │
                  └───── the watch: cancels, deadlines, silence ─────▶ final

A request is ended exactly once, by whoever comes first: its own thread or the watch. A thread whose stage died
may hang in Triton for ever; the watch has then ended its request, and nobody waits for the thread.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable
from dataclasses import replace

from python_backend.attempts import Attempts
from python_backend.encoding import Encoding
from python_backend.errors import (
    DeadlineExceeded,
    EmbeddingGone,
    InternalError,
    Overloaded,
    PeerGone,
    RelayError,
)
from python_backend.generate import GenerateRequest
from python_backend.house import House
from python_backend.metrics import Meter
from python_backend.placing import RESTART_S, Placing
from python_backend.prompt import PromptBuilder
from python_backend.stream import Attempt, Client, Gathered, Stages, Stream
from python_backend.timeline import Attribute, Timeline
from python_backend.tracing import NoTracer, Tracer
from python_backend.watch import Watch, too_late
from scheduler.profile import LimitsTable

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # per request: the first, and two more when stages die


class Relay:
    """Serves requests through the stages. Its methods may be called from any thread.

    A request whose stage dies is tried again on another replica, from the tokens that were given already; a
    thread that hangs in the dead stage is left to itself.
    """

    def __init__(
        self,
        stages: Stages,
        prompts: PromptBuilder,
        placing: Placing,
        limits: LimitsTable,
        meter: Meter,
        clock: Callable[[], float],
        is_draining: Callable[[], bool] = lambda: False,
        chance: random.Random | None = None,
        gate_width: int = 16,
        tracer: Tracer | None = None,
    ) -> None:
        self._meter = meter
        self._clock = clock
        self._tracer = tracer or NoTracer()
        self._is_draining = is_draining
        self._chance = chance or random.Random()
        self._placing = placing
        self._encoding = Encoding(stages, gate_width)
        self._house = House(placing, limits)
        warn_ms = limits.encode_transfer_warn_ms
        self._attempts = Attempts(stages, prompts, placing, self._house, self._encoding, meter, clock, warn_ms)
        self._serials = itertools.count(1)
        self._watch = Watch(self._house, limits.stall_s, clock, self._end)

    def num_in_flight(self) -> int:
        """Requests being served or waiting."""
        return sum(self._house.counts())

    def accept(self, request: GenerateRequest, client: Client, trace: str = "") -> None:
        """Takes responsibility for a request: it will be ended, exactly once.

        A full house, a wait that would be too long, or a draining server ends it here, with `Overloaded`.
        `trace` is a W3C traceparent.
        """
        now = self._clock()
        deadline_s = None if request.deadline_s is None else now + request.deadline_s
        stream = Stream(
            id=f"{now:.6f}-{next(self._serials)}",
            request=self._with_seed(request),
            client=client,
            arrived_s=now,
            rank=self._house.rank(request.priority, now),
            deadline_s=deadline_s,
            progress_s=now,
            attempt=Attempt(1),
            gathered=Gathered(request.is_streaming),
            timeline=Timeline(now),
            trace=trace,
        )
        if self._is_draining():
            self._meter.add("vlm_relay_rejected_total", labels={"reason": "draining"})
            self._end(stream, Overloaded("the server is stopping and takes no new requests", 5.0))
            return
        refusal = self._house.enter(stream, now)
        if refusal is not None:
            self._meter.add("vlm_relay_rejected_total", labels={"reason": "full"})
            self._end(stream, refusal)
            return
        self._meter.add("vlm_relay_admitted_total")
        self._dispatch()

    def replica_died(self, name: str) -> None:
        """Gives no new work to a replica, and tries what waits for it elsewhere. Returns at once."""
        self._placing.died(name)
        self._encoding.died(name)
        waiting = self._house.waiting_for(name)
        self._meter.add("vlm_relay_deaths_total", labels={"replica": name})
        for stream, attempt in waiting:
            self._try_again(stream, attempt, PeerGone(f"{name} died; retry"))

    def replica_returned(self, name: str) -> None:
        """Gives work to a replica again."""
        self._placing.returned(name)
        self._meter.add("vlm_relay_recoveries_total", labels={"replica": name})
        self._dispatch()

    def close(self) -> None:
        """Ends every request that is left, and the watch."""
        self._watch.close()
        serving, waiting = self._house.everybody()
        self._house.send_away(waiting)  # or an ended request's place would start it
        for stream in (*serving, *waiting):
            self._end(stream, PeerGone("the server is stopping"))
        self._encoding.close()

    def _with_seed(self, request: GenerateRequest) -> GenerateRequest:
        """A request that samples gets its seed here, so that another decoder can go on where one died."""
        sampling = request.sampling
        if sampling.temperature == 0 or sampling.seed is not None:
            return request
        return replace(request, sampling=replace(sampling, seed=self._chance.getrandbits(63)))

    # -- places -------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Gives free places to those who wait, most urgent first."""
        while (stream := self._house.serve_next(now := self._clock())) is not None:
            stream.attempt.observed.queue_s = now - stream.arrived_s
            self._start(stream, stream.attempt)
        serving, waiting = self._house.counts()
        self._meter.set("vlm_relay_in_flight_requests", serving)
        self._meter.set("vlm_relay_waiting_requests", waiting)

    def _start(self, stream: Stream, attempt: Attempt) -> None:
        name = stream.job_id(attempt)
        threading.Thread(target=self._serve, args=(stream, attempt), name=name, daemon=True).start()

    # -- attempts -----------------------------------------------------------------------------------------

    def _serve(self, stream: Stream, attempt: Attempt) -> None:
        try:
            if self._attempts.run(stream, attempt):
                self._settle(stream, "ok")
        except (PeerGone, EmbeddingGone) as error:
            self._try_again(stream, attempt, error)
        except DeadlineExceeded:
            self._end(stream, too_late(stream, "being served"), attempt)
        except RelayError as error:
            self._end(stream, error, attempt)
        except Exception as error:
            logger.exception("%s: failed", stream.id)
            self._end(stream, InternalError(f"the scheduler failed: {type(error).__name__}"), attempt)
        finally:
            self._close_attempt(attempt, stream)

    def _try_again(self, stream: Stream, attempt: Attempt, error: RelayError) -> None:
        """Starts the next attempt of a request, or ends it with `error` when it has had enough."""
        with stream.lock:
            if stream.is_ended or stream.attempt is not attempt:
                return
            has_more = attempt.number < MAX_ATTEMPTS
            if has_more:
                stream.attempt = Attempt(attempt.number + 1)
                stream.progress_s = self._clock()
        if not has_more:
            gone = isinstance(error, PeerGone)  # wherever it went; those who come later may fare better
            self._end(stream, Overloaded(error.text.removesuffix("; retry"), RESTART_S) if gone else error, attempt)
            return
        logger.warning("%s: tried again after %d tokens: %s", stream.id, len(stream.token_ids), error)
        self._meter.add("vlm_relay_retries_total")
        self._close_attempt(attempt, stream)
        self._start(stream, stream.attempt)

    def _close_attempt(self, attempt: Attempt, stream: Stream) -> None:
        """Gives back what an attempt holds, to those who wait."""
        self._attempts.give_back(stream, attempt)
        self._dispatch()

    # -- ends ---------------------------------------------------------------------------------------------

    def _end(self, stream: Stream, error: RelayError, attempt: Attempt | None = None) -> None:
        """Ends a request with an error, unless it has ended already, or `attempt` is no longer its own."""
        with stream.lock:
            if stream.is_ended or (attempt is not None and stream.attempt is not attempt):
                return
            stream.is_ended = True
            try:
                stream.client.fail(error)
            except Exception:  # nobody to tell; the place and the decoder are freed all the same
                logger.exception("%s: the client could not be told", stream.id)
        logger.log(
            logging.ERROR if isinstance(error, InternalError) else logging.INFO,
            "%s: ended after %.3f s: %s",
            stream.id,
            self._clock() - stream.arrived_s,
            error,
        )
        current = stream.attempt
        if current.is_decoding and current.place is not None:
            # In a thread of its own: a dead decoder answers late or never.
            arguments = (current.place.decision.decoder, stream.job_id(current))
            threading.Thread(target=self._attempts.stop, args=arguments, daemon=True).start()
        self._settle(stream, error.code)

    def _settle(self, stream: Stream, outcome: str) -> None:
        """Frees the place of an ended request."""
        self._house.leave(stream)
        self._meter.add("vlm_relay_requests_total", labels={"outcome": outcome})
        if stream.trace:
            told: dict[str, Attribute] = {"request": stream.id, "outcome": outcome, "tokens": len(stream.token_ids)}
            self._tracer.ended(stream.trace, stream.timeline, told)
        self._dispatch()
