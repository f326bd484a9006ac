"""The life of a request: admit, decide, encode, decode, relay; and the watch over all of them.

    accept ─▶ waiting room ─▶ one thread each: tokens ─▶ encode ─▶ decode ─▶ reply, reply, final
                  │                               │
                  └───── the watch: cancels, deadlines, silence ─────▶ final

A request is ended exactly once, by whoever comes first: its own thread or the watch. A thread whose stage died
may hang in Triton for ever; the watch has then ended its request, and nobody waits for the thread.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

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
from python_backend.prompt import Prompt, PromptBuilder
from python_backend.stream import (
    Attempt,
    Chunk,
    Client,
    DecodeJob,
    Gathered,
    Progress,
    Reply,
    Stages,
    Stream,
)
from python_backend.timeline import Attribute, Timeline
from python_backend.tracing import NoTracer, Tracer
from python_backend.watch import Watch, too_late
from scheduler.cost import IMAGE_TOKENS
from scheduler.decision import Decision
from scheduler.ledger import Place
from scheduler.loads import RequestShape
from scheduler.prefix import prefix_keys
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
        self._stages = stages
        self._prompts = prompts
        self._warn_ms = limits.encode_transfer_warn_ms
        self._meter = meter
        self._clock = clock
        self._tracer = tracer or NoTracer()
        self._is_draining = is_draining
        self._chance = chance or random.Random()
        self._placing = placing
        self._encoding = Encoding(stages, gate_width)
        self._house = House(placing, limits)
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

    # -- one attempt --------------------------------------------------------------------------------------

    def _serve(self, stream: Stream, attempt: Attempt) -> None:
        try:
            self._run(stream, attempt)
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

    def _run(self, stream: Stream, attempt: Attempt) -> None:
        request, began_s = stream.request, self._clock()
        if attempt.number == 1:
            stream.timeline.add("queue", stream.arrived_s, began_s, priority=request.priority)
            labels = {"priority": _urgency(request.priority)}
            self._meter.observe("vlm_relay_queue_seconds", began_s - stream.arrived_s, labels)
        image_tokens = self._prompts.count_image_tokens(request.images)
        prompt = self._prompts.build(request.text, request.messages, image_tokens)
        place = self._place(stream, attempt, prompt, image_tokens)
        decision = place.decision
        stream.timeline.add("decide", began_s, self._clock(), attempt=attempt.number, **_told(decision))
        self._tell(stream, attempt, Progress("placed", decision if request.returns.decision else None))
        self._encode(stream, attempt, place)
        if decision.encoders:
            self._tell(stream, attempt, Progress("encoded", None))
        self._decode(stream, attempt, prompt, decision)

    def _tell(self, stream: Stream, attempt: Attempt, progress: Progress) -> None:
        """Says how far a request is, if its client wants to know."""
        if stream.request.returns.progress:
            with stream.lock:
                if not stream.is_ended and stream.attempt is attempt:
                    stream.client.progress(progress)

    def _place(self, stream: Stream, attempt: Attempt, prompt: Prompt, image_tokens: Sequence[int]) -> Place:
        request = stream.request
        num_images = len(request.images)
        keys = tuple(hashlib.blake2b(image, digest_size=16).digest() for image in request.images)
        max_tokens = request.sampling.max_tokens
        of_each = sum(image_tokens) // num_images if num_images else IMAGE_TOKENS
        prefixes = prefix_keys(prompt.token_ids, self._prompts.image_token_id, keys, image_tokens)
        shape = RequestShape(num_images, prompt.num_tokens, max_tokens, of_each, keys)
        try:
            attempt.place = place = self._placing.take(shape, prefixes)
        except Overloaded:
            self._meter.add("vlm_relay_rejected_total", labels={"reason": "stages"})
            raise
        self._house.note_arrived(attempt)
        labels = {"mode": place.decision.mode, "reason": place.decision.reason_kind}
        self._meter.add("vlm_relay_decisions_total", labels=labels)
        return place

    def _encode(self, stream: Stream, attempt: Attempt, place: Place) -> None:
        """Fills `attempt.handles`, in the order of the images."""
        encoders = place.decision.encoders
        if not encoders:
            return
        self._house.wait_on(attempt, *encoders)
        began_s = self._clock()
        self._encoding.run(
            encoders,
            stream.request.images,
            stream.rank,
            is_over=lambda: stream.is_ended or stream.attempt is not attempt,
            keep=attempt.keep,
        )
        stream.progress_s = self._clock()
        attempt.observed.encode_s = stream.progress_s - began_s
        stream.timeline.add("encode", began_s, stream.progress_s, encoders=",".join(encoders))
        self._placing.note_encoded(place)
        slow = place.decision.warning(self._warn_ms, attempt.observed.encode_s)
        if slow is not None:
            logger.warning("%s: %s", stream.id, slow)

    def _decode(self, stream: Stream, attempt: Attempt, prompt: Prompt, decision: Decision) -> None:
        request = stream.request
        sampling = request.sampling
        if sampling.logprobs is None and request.returns.cumulative_logprob:
            sampling = replace(sampling, logprobs=0)
        with stream.lock:
            if stream.is_ended or stream.attempt is not attempt:
                return
            attempt.is_decoding = True
            generated_ids, logprob = tuple(stream.token_ids), stream.cumulative_logprob
        self._house.wait_on(attempt, decision.decoder)
        job = DecodeJob(
            request_id=stream.job_id(attempt),
            token_ids=prompt.token_ids,
            handles=tuple(attempt.handles),
            sampling=sampling,
            deadline_s=stream.deadline_s,
            generated_ids=generated_ids,
            rank=stream.rank,
        )
        began_s = self._clock()
        for chunk in self._stages.decode(decision.decoder, job):
            attempt.note_chunk(chunk, began_s, self._clock())
            if chunk.finish_reason is not None:
                stream.timeline.add_decoding(decision.decoder, began_s, self._clock(), chunk.times)
                self._count_bytes(decision, chunk)
            total = replace(chunk, cumulative_logprob=logprob + chunk.cumulative_logprob)
            if not self._take(stream, attempt, prompt, total):
                if chunk.finish_reason is None:  # ended by the watch, whose cancel may have come before the job
                    self._cancel(decision.decoder, job.request_id)
                return
        raise PeerGone(f"{decision.decoder} ended the stream without finishing the answer; retry")

    def _count_bytes(self, decision: Decision, chunk: Chunk) -> None:
        """Counts the embeddings that a decoder took from each encoder; images are all of about one size."""
        for encoder in decision.encoders if chunk.transfer_bytes else ():
            num_bytes = chunk.transfer_bytes / len(decision.encoders)
            labels = {"encoder": encoder, "decoder": decision.decoder}
            self._meter.add("vlm_relay_transferred_bytes_total", num_bytes, labels)

    def _take(self, stream: Stream, attempt: Attempt, prompt: Prompt, chunk: Chunk) -> bool:
        """Keeps what came and replies when something is due; False when the request is out of our hands."""
        now = self._clock()
        with stream.lock:
            if stream.is_ended or stream.attempt is not attempt:
                return False
            stream.progress_s = now
            stream.token_ids.extend(chunk.token_ids)
            stream.cumulative_logprob = chunk.cumulative_logprob
            stream.gathered.add(chunk)
            if not stream.gathered.is_due():
                return True
            whole = stream.gathered.take()
            is_first, is_last = stream.first_reply_s is None, whole.finish_reason is not None
            stream.first_reply_s = now if is_first else stream.first_reply_s
            tells = is_first and attempt.place is not None and stream.request.returns.decision
            decision = attempt.place.decision if tells and attempt.place else None
            # If it raises, not ended.
            stream.client.reply(Reply(stream.request, prompt, whole, decision, attempt.observed), is_last)
            stream.is_ended = is_last
        if is_first:
            self._meter.observe("vlm_relay_ttft_seconds", now - stream.arrived_s)
        if is_last:
            self._meter.observe("vlm_relay_request_seconds", now - stream.arrived_s)
            if attempt.place is not None:
                self._placing.learn(attempt.place.decision, attempt.observed)
            self._settle(stream, "ok")
        return not is_last

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
        """Gives back what an attempt holds; also what a late answer of a dead stage brought after that."""
        self._house.note_arrived(attempt)
        handles = self._house.take_handles(attempt)
        if attempt.place is not None:
            self._placing.give_back(attempt.place)
        for handle in handles:
            try:
                self._stages.release(handle)
            except Exception:  # one that cannot be given back keeps no other, and runs out by itself
                logger.exception("%s: a lease could not be given back", stream.id)
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
            threading.Thread(target=self._cancel, args=arguments, daemon=True).start()
        self._settle(stream, error.code)

    def _cancel(self, decoder: str, request_id: str) -> None:
        if self._placing.is_down(decoder):
            return
        try:
            self._stages.cancel(decoder, request_id)
        except RelayError as error:
            logger.warning("%s: %s could not be told to stop: %s", request_id, decoder, error)

    def _settle(self, stream: Stream, outcome: str) -> None:
        """Frees the place of an ended request."""
        self._house.leave(stream)
        self._meter.add("vlm_relay_requests_total", labels={"outcome": outcome})
        if stream.trace:
            told: dict[str, Attribute] = {"request": stream.id, "outcome": outcome, "tokens": len(stream.token_ids)}
            self._tracer.ended(stream.trace, stream.timeline, told)
        self._dispatch()


def _urgency(priority: int) -> str:
    """A priority as one of three labels: smaller is more urgent, 0 is what clients send who do not care."""
    return "normal" if priority == 0 else "urgent" if priority < 0 else "patient"


def _told(decision: Decision) -> dict[str, Attribute]:
    """A decision as attributes of its span."""
    told: dict[str, Attribute] = {"decoder": decision.decoder, "mode": decision.mode, "reason": decision.reason}
    return told | ({"encoders": ",".join(decision.encoders)} if decision.encoders else {})
