"""The decoder's engine: schedule a step, run it, give each request what it got.

submit ──▶ inbox ──▶ waiting ──▶ running ──▶ Delta, Delta, ..., final Delta
           any thread │ the engine thread
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from python_backend.decoder.batch import Chunk, StepChooser
from python_backend.decoder.detokenize import load_tokenizer
from python_backend.decoder.inbox import Inbox
from python_backend.decoder.intake import Intake, reason_to_end
from python_backend.decoder.kv_cache import BlockPool
from python_backend.decoder.options import EngineOptions, EngineStatus
from python_backend.decoder.runner import ModelRunner, Outcome, is_decode
from python_backend.decoder.sampling import Choice, describe
from python_backend.decoder.sequence import (
    DecodeRequest,
    Delta,
    Emit,
    ImageEmbedding,
    Sequence,
)
from python_backend.errors import (
    Cancelled,
    InternalError,
    PeerGone,
    RelayError,
)
from scheduler.step import PromptBudget

__all__ = ["DecodeRequest", "Delta", "Engine", "EngineOptions", "EngineStatus", "ImageEmbedding"]

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching of generations on one device.

    `submit`, `cancel` and `status` are for any thread; they reach the engine thread, which owns all other state,
    through the inbox.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        options: EngineOptions,
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._options = options
        self._clock = clock
        self._pool = BlockPool(runner.num_blocks)
        self._chooser = StepChooser(
            self._pool,
            options.block_tokens,
            options.max_sequences,
            options.max_step_tokens,
            options.prefix_cache,
            runner.num_ahead,
        )
        self._budget = PromptBudget(options.step_limit_s, options.max_step_tokens)
        self._status = EngineStatus(free_blocks=runner.num_blocks, total_blocks=runner.num_blocks)
        self._intake = Intake(runner.config, runner.context_tokens, tokenizer, clock, draw_seed)
        self._inbox = Inbox(options.max_sequences + options.max_waiting)
        self._thread = threading.Thread(target=self._loop, name="decoder-engine", daemon=True)

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        options: EngineOptions,
        clock: Callable[[], float],
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> Engine:
        """An engine with the weights of a checkpoint folder, not started yet.

        `clock` gives seconds; deadlines are on it. `draw_seed` gives the seed of requests without one.

        Raises:
            BadCheckpoint: a file of the checkpoint is missing, broken or of an architecture not served.
        """
        runner = ModelRunner(checkpoint, options)
        logger.info(
            "decoder loaded from %s: %s on %s, context %d tokens, %d blocks of %d tokens",
            *(checkpoint, options.dtype, options.device, runner.context_tokens, runner.num_blocks),
            options.block_tokens,
        )
        return cls(runner, load_tokenizer(checkpoint), options, clock, draw_seed)

    @property
    def context_tokens(self) -> int:
        """The most tokens of prompt and answer together."""
        return self._runner.context_tokens

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def close(self) -> None:
        """End all requests with `PeerGone` and stop the engine thread; returns when it has stopped."""
        self._inbox.close()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._end_all(PeerGone("the decoder closed before it started"))

    def submit(self, request: DecodeRequest, emit: Emit) -> None:
        """Queue a request. `emit` gets its deltas on the engine thread, the last one final, none after that.

        `emit` must return at once, as all requests wait for it; one that raises ends its request.

        Raises:
            InvalidPrompt: images do not match the image tokens, or the prompt does not fit.
            InvalidRequest: the request id is in use.
            Overloaded: `max_sequences` and `max_waiting` more have not ended yet.
            DeadlineExceeded: the deadline has passed.
            PeerGone: the engine is closed.
        """
        self._inbox.put(self._intake.receive(request, emit))

    def cancel(self, request_id: str) -> bool:
        """End a request with `Cancelled` before its next token; False when it is not here (any more)."""
        return self._inbox.cancel(request_id)

    def status(self) -> EngineStatus:
        """Counts as of the end of the last step."""
        return self._status

    def check_integrity(self) -> None:
        """Compare the block pool's books with the sequences, while idle or closed; raises AssertionError."""
        self._pool.check_integrity([sequence.blocks for sequence in self._chooser.running])

    # The engine thread from here on.

    def _loop(self) -> None:
        if self._options.num_threads is not None:
            torch.set_num_threads(self._options.num_threads)
        while self._inbox.wait():
            self.step()
        self._end_all(PeerGone("the decoder is closing"))
        self._report()

    def step(self) -> None:
        """Take in what was submitted, compute one step, give each request what it got."""
        try:
            self._take_in()
            self._end_unwanted()
            chunks = self._chooser.choose(self._budget)
            if chunks:
                self._postprocess(chunks, self._run_timed(chunks))
        except Exception as error:
            # Nothing above is expected to raise here, so nobody in particular is to blame.
            logger.exception("decoder step failed; its requests end")
            self._end_all(InternalError(f"the decoder failed: {type(error).__name__}"))
        self._report()

    def _take_in(self) -> None:
        """Queue what was submitted; one that was complete before it came ends at once."""
        for sequence in self._inbox.take():
            self._chooser.add(sequence)
            if sequence.finish_reason is not None:
                self._give(sequence, sequence.delta())

    def _end_unwanted(self) -> None:
        """End what was cancelled or is too late."""
        now_s = self._clock()
        for sequence in [*self._chooser.running, *self._chooser.waiting]:
            error = reason_to_end(sequence, now_s)
            if error is not None:
                self._fail(sequence, error)

    def _run_timed(self, chunks: list[Chunk]) -> list[Outcome]:
        start_s = self._clock()
        for chunk in chunks:
            times = chunk.sequence.times
            times.started_s = start_s if times.started_s is None else times.started_s
        outcomes = self._run(chunks)
        num_decodes = sum(is_decode(chunk) for chunk in chunks)
        num_prompt_tokens = sum(chunk.num_tokens for chunk in chunks) - num_decodes
        self._budget.learn(num_decodes, num_prompt_tokens, self._clock() - start_s)
        return outcomes

    def _run(self, chunks: list[Chunk]) -> list[Outcome]:
        """What the chunks gave; if the step fails, each is computed alone, to find out whose fault it is."""
        try:
            return self._runner.run(chunks)
        except Exception as error:
            if len(chunks) == 1:
                logger.exception("%s: decoder step failed", chunks[0].sequence.request.request_id)
                return [InternalError(f"the decoder failed: {type(error).__name__}")]
            logger.exception("decoder step of %d sequences failed; running them one by one", len(chunks))
        return [outcome for chunk in chunks for outcome in self._run([chunk])]

    def _postprocess(self, chunks: list[Chunk], outcomes: list[Outcome]) -> None:
        """Give each sequence the token that was chosen for it, or its error."""
        num_decoded = sum(is_decode(chunk) for chunk in chunks)
        num_given = 0
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            sequence = chunk.sequence
            if isinstance(outcome, InternalError):
                self._fail(sequence, outcome, is_poisoned=True)
            elif sequence.is_cancelled:
                self._fail(sequence, Cancelled(f"{sequence.request.request_id}: cancelled"))
            else:
                self._chooser.complete(chunk)
                if outcome is not None:
                    self._advance(sequence, outcome)
                    num_given += 1
        self._status = replace(
            self._status,
            num_steps=self._status.num_steps + 1,
            last_batch_sequences=num_decoded,
            largest_batch_sequences=max(self._status.largest_batch_sequences, num_decoded),
            num_generated_tokens=self._status.num_generated_tokens + num_given,
        )

    def _advance(self, sequence: Sequence, choice: Choice) -> None:
        try:
            text = sequence.append(choice.chosen.token_id, self._runner.config.eos_ids, self.context_tokens)
            wants_logprobs = sequence.sampling.logprobs is not None
            logprobs = (describe(choice, self._tokenizer),) if wants_logprobs else ()
        except Exception as error:
            logger.exception("%s: its token has no text", sequence.request.request_id)
            self._fail(sequence, InternalError(f"the tokenizer failed: {type(error).__name__}"))
            return
        sequence.cumulative_logprob += choice.chosen.logprob
        times = sequence.times
        times.last_token_s, times.last_step = self._clock(), self._status.num_steps
        if times.first_token_s is None:
            times.first_token_s, times.first_step = times.last_token_s, times.last_step
        self._give(sequence, sequence.delta((choice.chosen.token_id,), text, logprobs))

    def _fail(self, sequence: Sequence, error: RelayError, is_poisoned: bool = False) -> None:
        self._give(sequence, sequence.delta(error=error), is_poisoned)

    def _give(self, sequence: Sequence, delta: Delta, is_poisoned: bool = False) -> None:
        """Hand out a delta; before a final one the sequence is taken out and its blocks given back."""
        if delta.is_final:
            self._take_out(sequence, is_poisoned)
        try:
            sequence.emit(delta)
        except Exception as error:
            logger.exception("%s: its receiver raised; the request ends", sequence.request.request_id)
            if not delta.is_final:
                self._fail(sequence, InternalError(f"the receiver of tokens failed: {type(error).__name__}"))

    def _take_out(self, sequence: Sequence, is_poisoned: bool) -> None:
        unheld = self._chooser.remove(sequence, is_poisoned)
        if is_poisoned:
            self._runner.clear(unheld)
        self._inbox.forget(sequence)

    def _end_all(self, error: RelayError) -> None:
        for sequence in self._inbox.take():
            self._chooser.add(sequence)
        for sequence in self._inbox.live():
            self._fail(sequence, error)

    def _report(self) -> None:
        """Publish the counts."""
        chooser = self._chooser
        known = (*chooser.running, *chooser.waiting)
        self._status = replace(
            self._status,
            num_running=len(chooser.running),
            num_waiting=len(chooser.waiting),
            free_blocks=self._pool.num_available,
            pending_prefill_tokens=sum(each.num_uncomputed for each in known if not each.is_decoding),
            num_prompt_tokens=chooser.num_prompt_tokens,
            num_cached_tokens=chooser.num_cached_tokens,
            num_preemptions=chooser.num_preemptions,
        )
