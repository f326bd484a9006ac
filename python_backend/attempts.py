"""One attempt at a request: tokens ─▶ a place ─▶ encode ─▶ decode ─▶ reply, reply, the last."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from python_backend.encoding import Encoding
from python_backend.errors import Overloaded, PeerGone, RelayError
from python_backend.house import House
from python_backend.metrics import Meter
from python_backend.placing import Placing
from python_backend.prompt import Prompt, PromptBuilder
from python_backend.stream import Attempt, Chunk, DecodeJob, Progress, Reply, Stages, Stream
from python_backend.timeline import Attribute
from scheduler.cost import IMAGE_TOKENS
from scheduler.decision import Decision
from scheduler.ledger import Place
from scheduler.loads import RequestShape
from scheduler.prefix import prefix_keys

logger = logging.getLogger(__name__)


class Attempts:
    """Takes attempts through the stages. Any thread may call it; each attempt is run by one.

    An attempt whose request has ended, or is tried again elsewhere, says nothing more to the client.
    """

    def __init__(
        self,
        stages: Stages,
        prompts: PromptBuilder,
        placing: Placing,
        house: House,
        encoding: Encoding,
        meter: Meter,
        clock: Callable[[], float],
        warn_ms: float,
    ) -> None:
        """`warn_ms`: encoding and transfer that take longer are told in the log."""
        self._stages = stages
        self._prompts = prompts
        self._placing = placing
        self._house = house
        self._encoding = encoding
        self._meter = meter
        self._clock = clock
        self._warn_ms = warn_ms

    def run(self, stream: Stream, attempt: Attempt) -> bool:
        """Serves a request; whether it gave the last word. What the attempt holds is the caller's to give back.

        Raises:
            RelayError: as the stages, or for want of a place.
        """
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
        return self._decode(stream, attempt, prompt, decision)

    def give_back(self, stream: Stream, attempt: Attempt) -> None:
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

    def stop(self, decoder: str, request_id: str) -> None:
        """Tells a decoder to stop, unless it is down. It may answer late or never."""
        if self._placing.is_down(decoder):
            return
        try:
            self._stages.cancel(decoder, request_id)
        except RelayError as error:
            logger.warning("%s: %s could not be told to stop: %s", request_id, decoder, error)

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
            keep=functools.partial(self._house.keep, attempt),
        )
        stream.progress_s = self._clock()
        attempt.observed.encode_s = stream.progress_s - began_s
        stream.timeline.add("encode", began_s, stream.progress_s, encoders=",".join(encoders))
        self._placing.note_encoded(place)
        slow = place.decision.warning(self._warn_ms, attempt.observed.encode_s)
        if slow is not None:
            logger.warning("%s: %s", stream.id, slow)

    def _decode(self, stream: Stream, attempt: Attempt, prompt: Prompt, decision: Decision) -> bool:
        request = stream.request
        sampling = request.sampling
        if sampling.logprobs is None and request.returns.cumulative_logprob:
            sampling = replace(sampling, logprobs=0)
        with stream.lock:
            if stream.is_ended or stream.attempt is not attempt:
                return False
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
                    self.stop(decision.decoder, job.request_id)
                return False
            if chunk.finish_reason is not None:
                return True
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
        return True


def _urgency(priority: int) -> str:
    """A priority as one of three labels: smaller is more urgent, 0 is what clients send who do not care."""
    return "normal" if priority == 0 else "urgent" if priority < 0 else "patient"


def _told(decision: Decision) -> dict[str, Attribute]:
    """A decision as attributes of its span."""
    told: dict[str, Attribute] = {"decoder": decision.decoder, "mode": decision.mode, "reason": decision.reason}
    return told | ({"encoders": ",".join(decision.encoders)} if decision.encoders else {})
