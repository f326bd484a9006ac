"""A request on its way through the decoder: what is asked, how far it is, what each step gave."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch
from tokenizers import Tokenizer

from python_backend.decoder.detokenize import TextStream
from python_backend.errors import RelayError
from python_backend.request import SamplingParameters


@dataclass(frozen=True, slots=True)
class ImageEmbedding:
    """One image's features after the projector; the engine owns them, so nobody writes them any more."""

    digest: bytes  # of the image's content: the same digest means the same features
    features: torch.Tensor  # (tokens, width)


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """A prompt to continue. `generated_ids` are tokens that another decoder already gave: they count for
    `max_tokens`, the penalties, the seed and the text, but are not given out again."""

    request_id: str
    token_ids: tuple[int, ...]  # one image token per image, replaced by its features' rows
    images: tuple[ImageEmbedding, ...]
    sampling: SamplingParameters
    deadline_s: float | None = None  # on the engine's clock
    generated_ids: tuple[int, ...] = ()
    rank: float = 0.0  # of those that wait, the smallest is admitted first


@dataclass(slots=True)
class StepTimes:
    """When a request passed the stations of the engine, on its clock; None while it has not.

    `first_step` and `last_step` are the engine's counts of steps when the first and the last token came.
    """

    accepted_s: float
    started_s: float | None = None  # its first step began
    first_token_s: float | None = None
    first_step: int | None = None
    last_token_s: float | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class RankedToken:
    """One token with its log-probability before penalties and temperature; the most likely has rank 1."""

    token_id: int
    logprob: float
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token, and the most likely ones at its place."""

    token_id: int
    logprob: float
    rank: int
    text: str
    top: tuple[RankedToken, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step gave one request; `text` lags behind while a character or a stop string is open."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]  # one per token where the request asked for them, else empty
    finish_reason: str | None  # "stop" or "length"; None while it goes on, or after an error
    error: RelayError | None  # the request ended with it
    num_prompt_tokens: int  # image tokens counted
    num_cached_tokens: int  # of those, found in the prefix cache
    cumulative_logprob: float  # of the tokens given out here so far
    times: StepTimes  # the request's own, which the engine goes on writing

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None


Emit = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where an image stands in the expanded prompt: positions `start` to `end`, the latter excluded."""

    start: int
    end: int
    image: ImageEmbedding


class Sequence:
    """One request's tokens, blocks and text. Owned by the engine thread, but for `is_cancelled`.

    `token_ids` are the expanded prompt and then what was generated. The first `num_computed` of them are in
    the cache, in `blocks`.
    """

    def __init__(
        self,
        request: DecodeRequest,
        emit: Emit,
        serial: int,
        prompt: tuple[list[int], tuple[ImageSpan, ...]],
        tokenizer: Tokenizer,
        seed: int,
        accepted_s: float = 0.0,
    ) -> None:
        self.request = request
        self.times = StepTimes(accepted_s)
        self.emit = emit
        self.serial = serial  # order of arrival
        self.seed = seed
        prompt_ids, self.spans = prompt
        self.num_prompt_tokens = len(prompt_ids)
        self.token_ids = [*prompt_ids, *request.generated_ids]
        sampling = request.sampling
        self.text = TextStream(
            tokenizer, sampling.stop, sampling.include_stop_str_in_output, sampling.skip_special_tokens
        )
        self.blocks: list[int] = []
        self.num_computed = 0
        self.num_cached_tokens: int | None = None  # of the prompt; None until it is admitted
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.is_cancelled = False  # set by any thread, never taken back
        self._keys: list[bytes] = []

    @property
    def sampling(self) -> SamplingParameters:
        """How its tokens are chosen."""
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and generated."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, here or elsewhere."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that are not in the cache."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token is left to compute."""
        return self.num_computed > 0 and self.num_uncomputed == 1

    def prompt_ids(self) -> list[int]:
        """The expanded prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    def generated_ids(self) -> list[int]:
        """The tokens generated so far, here or elsewhere."""
        return self.token_ids[self.num_prompt_tokens :]

    def restart(self) -> None:
        """Forget that anything is in the cache; the blocks were given back."""
        self.blocks = []
        self.num_computed = 0

    def resume_text(self, eos_ids: frozenset[int], context_tokens: int) -> None:
        """Bring text and finish reason to where they were after `request.generated_ids`."""
        for count, token_id in enumerate(self.request.generated_ids, start=1):
            if self.finish_reason is None:
                self._advance_text(token_id, count, eos_ids, context_tokens)

    def append(self, token_id: int, eos_ids: frozenset[int], context_tokens: int) -> str:
        """Add a generated token; the text it gives. Sets `finish_reason` when it is the last."""
        self.token_ids.append(token_id)
        return self._advance_text(token_id, self.num_generated, eos_ids, context_tokens)

    def delta(
        self,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        error: RelayError | None = None,
    ) -> Delta:
        """What to tell its receiver; final when it is finished or there is an error."""
        return Delta(
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            finish_reason=None if error else self.finish_reason,
            error=error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            cumulative_logprob=self.cumulative_logprob,
            times=self.times,
        )

    def _advance_text(self, token_id: int, num_generated: int, eos_ids: frozenset[int], context_tokens: int) -> str:
        sampling = self.sampling
        is_end = token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in eos_ids)
        if is_end and num_generated > sampling.min_tokens:
            self.finish_reason = "stop"
            text = self.text.push(token_id) if sampling.include_stop_str_in_output else ""
            return text + self.text.flush()
        text = self.text.push(token_id, may_stop=num_generated > sampling.min_tokens)
        if self.text.is_stopped:
            self.finish_reason = "stop"
        elif num_generated >= sampling.max_tokens or self.num_prompt_tokens + num_generated >= context_tokens:
            self.finish_reason = "length"
            text += self.text.flush()
            if self.text.is_stopped:
                self.finish_reason = "stop"
        return text

    def block_keys(self, block_tokens: int, num_blocks: int) -> Iterator[bytes]:
        """The keys of its first `num_blocks` blocks, which must be full, computed as they are asked for."""
        for index in range(num_blocks):
            if index == len(self._keys):
                self._keys.append(self._block_key(index, block_tokens))
            yield self._keys[index]

    def _block_key(self, index: int, block_tokens: int) -> bytes:
        """Of the key before, the block's token ids, and for image tokens which rows of which image."""
        start, end = index * block_tokens, (index + 1) * block_tokens
        assert end <= self.num_tokens, f"block {index} is not full"
        digest = blake2b(self._keys[index - 1] if index else b"", digest_size=32)
        digest.update(array("q", self.token_ids[start:end]).tobytes())
        for span in self.spans:
            first, last = max(start, span.start), min(end, span.end)
            if first < last:
                content = span.image.digest
                rows = (first - start, last - start, first - span.start)
                digest.update(struct.pack("<4q", *rows, len(content)))
                digest.update(content)
        return digest.digest()
