"""vLLM in the place of this project's engine: prompts with image features in, tokens and text out.

Batching and the model's arithmetic are vLLM's. What a token means (its text, stop strings, the end) stays with
`Sequence`, so that answers look the same to whoever receives them.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from python_backend.decoder.detokenize import load_tokenizer
from python_backend.decoder.inbox import Inbox
from python_backend.decoder.intake import Intake, reason_to_end
from python_backend.decoder.options import EngineOptions, EngineStatus
from python_backend.decoder.sequence import DecodeRequest, Delta, Emit, RankedToken, Sequence, TokenLogprob
from python_backend.errors import InternalError, PeerGone, RelayError
from python_backend.weights import DecoderConfig, read_config

logger = logging.getLogger(__name__)


class EngineMissing(RuntimeError):
    """vLLM is wanted and not installed here."""


class VllmEngine:
    """`Engine`'s methods over vLLM's engine in this process. Its own thread steps it and owns all other state."""

    def __init__(
        self,
        engine: Any,
        config: DecoderConfig,
        tokenizer: Tokenizer,
        options: EngineOptions,
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._config = config
        self._clock = clock
        self.context_tokens = int(engine.model_config.max_model_len)
        self._running: dict[str, Sequence] = {}
        self._intake = Intake(config, self.context_tokens, tokenizer, clock, draw_seed)
        self._inbox = Inbox(options.max_sequences + options.max_waiting)
        self._status = EngineStatus()
        self._thread = threading.Thread(target=self._loop, name="decoder-engine", daemon=True)

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        options: EngineOptions,
        clock: Callable[[], float],
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> VllmEngine:
        """An engine with the weights of a checkpoint folder, not started yet; `Engine.load` explains the arguments.

        Raises:
            EngineMissing: there is no vLLM in this environment.
            BadCheckpoint: the checkpoint's configuration or tokenizer is missing or broken.
        """
        config, tokenizer = read_config(checkpoint), load_tokenizer(checkpoint)
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: the replica's own
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if options.device == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, options.kv_cache_bytes >> 30)))
            # vLLM would bind itself to fewer cores than there are.
            cpus = sorted(os.sched_getaffinity(0))[: options.num_threads]
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cpus)))
        try:
            from vllm import LLM
        except ImportError as error:
            raise EngineMissing(f"engine 'vllm' needs vLLM in this environment: {error}") from error
        engine = LLM(
            str(checkpoint),
            dtype=options.dtype,
            max_num_seqs=options.max_sequences,
            max_num_batched_tokens=options.max_step_tokens,
            max_model_len=min(config.max_position_tokens, options.context_tokens or config.max_position_tokens),
            enable_prefix_caching=options.prefix_cache,
            enable_mm_embeds=True,
        ).llm_engine
        return cls(engine, config, tokenizer, options, clock, draw_seed)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def close(self) -> None:
        """End all requests with `PeerGone` and stop the engine thread."""
        self._inbox.close()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: DecodeRequest, emit: Emit) -> None:
        """As `Engine.submit`, with the same errors."""
        self._inbox.put(self._intake.receive(request, emit))

    def cancel(self, request_id: str) -> bool:
        """As `Engine.cancel`."""
        return self._inbox.cancel(request_id)

    def status(self) -> EngineStatus:
        """Sequences and tokens; of its blocks vLLM keeps the books."""
        return self._status

    # The engine thread from here on.

    def _loop(self) -> None:
        while self._inbox.wait():
            try:
                for sequence in self._inbox.take():
                    self._add(sequence)
                for sequence in list(self._running.values()):
                    error = reason_to_end(sequence, self._clock())
                    if error is not None:
                        self._end(sequence, error)
                if self._running:
                    for output in self._engine.step():
                        self._advance(output)
            except Exception as error:
                logger.exception("vLLM's step failed; its requests end")
                self._end_all(InternalError(f"the decoder failed: {type(error).__name__}"))
            self._report()
        self._end_all(PeerGone("the decoder is closing"))

    def _add(self, sequence: Sequence) -> None:
        request = sequence.request
        self._running[request.request_id] = sequence
        if sequence.finish_reason is not None:
            self._give(sequence, sequence.delta())
            return
        prompt: dict[str, Any] = {"prompt_token_ids": [*request.token_ids, *request.generated_ids]}
        if request.images:
            prompt["multi_modal_data"] = {"image": [image.features for image in request.images]}
        try:
            self._engine.add_request(request.request_id, prompt, _sampling(sequence))
        except ValueError as error:
            self._end(sequence, InternalError(f"vLLM refused the request: {error}"), aborts=False)

    def _advance(self, output: Any) -> None:
        """Give a sequence the tokens that a step gave it."""
        sequence = self._running.get(output.request_id)
        if sequence is None:
            return
        answer = output.outputs[0]
        known = sequence.num_generated - len(sequence.request.generated_ids)
        for place in range(known, len(answer.token_ids)):
            if sequence.finish_reason is not None:
                break
            token_id = int(answer.token_ids[place])
            text = sequence.append(token_id, self._config.eos_ids, self.context_tokens)
            logprobs = (_logprob(token_id, answer.logprobs[place]),) if answer.logprobs else ()
            if logprobs:
                sequence.cumulative_logprob += logprobs[0].logprob
            if sequence.finish_reason is not None and not output.finished:
                self._engine.abort_request([output.request_id])
            self._give(sequence, sequence.delta((token_id,), text, logprobs))

    def _end(self, sequence: Sequence, error: RelayError, aborts: bool = True) -> None:
        if aborts:
            self._engine.abort_request([sequence.request.request_id])
        self._give(sequence, sequence.delta(error=error))

    def _give(self, sequence: Sequence, delta: Delta) -> None:
        if delta.is_final:
            self._running.pop(sequence.request.request_id, None)
            self._inbox.forget(sequence)
        try:
            sequence.emit(delta)
        except Exception as error:
            logger.exception("%s: its receiver raised; the request ends", sequence.request.request_id)
            if not delta.is_final:
                self._end(sequence, InternalError(f"the receiver of tokens failed: {type(error).__name__}"))

    def _end_all(self, error: RelayError) -> None:
        for sequence in self._inbox.take():
            self._running[sequence.request.request_id] = sequence
        for sequence in list(self._running.values()):
            self._end(sequence, error)

    def _report(self) -> None:
        self._status = EngineStatus(num_running=len(self._running), num_steps=self._status.num_steps + 1)


def _sampling(sequence: Sequence) -> Any:
    from vllm import SamplingParams

    sampling = sequence.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sequence.seed % 2**63,
        max_tokens=sampling.max_tokens - len(sequence.request.generated_ids),
        min_tokens=max(0, sampling.min_tokens - len(sequence.request.generated_ids)),
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        detokenize=False,
    )


def _logprob(token_id: int, found: Any) -> TokenLogprob:
    """vLLM's table of one place: the chosen token and the most likely ones."""
    ranked = sorted(
        (
            RankedToken(int(key), float(each.logprob), int(each.rank or 0), each.decoded_token or "")
            for key, each in found.items()
        ),
        key=lambda each: each.rank,
    )
    chosen = next(each for each in ranked if each.token_id == token_id)
    return TokenLogprob(token_id, chosen.logprob, chosen.rank, chosen.text, tuple(ranked))
