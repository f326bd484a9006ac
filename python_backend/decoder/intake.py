"""A decode request checked against the model, and its prompt with the images in their places."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from tokenizers import Tokenizer

from python_backend.decoder.sequence import DecodeRequest, Emit, ImageEmbedding, ImageSpan, Sequence
from python_backend.errors import Cancelled, DeadlineExceeded, InvalidPrompt, RelayError
from python_backend.weights import DecoderConfig


class Intake:
    """Makes sequences of requests, for any engine. Any thread may call it."""

    def __init__(
        self,
        config: DecoderConfig,
        context_tokens: int,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        """`draw_seed` gives the seed of requests without one; deadlines are on `clock`."""
        self._config = config
        self._context_tokens = context_tokens
        self._tokenizer = tokenizer
        self._clock = clock
        self._draw_seed = draw_seed
        self._serials = count()

    def receive(self, request: DecodeRequest, emit: Emit) -> Sequence:
        """A sequence as far as the request's answer is known.

        Raises:
            InvalidPrompt: images do not match the image tokens, or the prompt does not fit.
            DeadlineExceeded: the deadline has passed.
        """
        now_s = self._clock()
        if request.deadline_s is not None and now_s >= request.deadline_s:
            raise DeadlineExceeded(f"{request.request_id}: the deadline passed before decoding began")
        prompt = expand_prompt(request.token_ids, request.images, self._config.image_token_id)
        check_prompt(request, len(prompt[0]), self._config, self._context_tokens)
        seed = self._draw_seed() if request.sampling.seed is None else request.sampling.seed
        sequence = Sequence(request, emit, next(self._serials), prompt, self._tokenizer, seed, now_s)
        sequence.resume_text(self._config.eos_ids, self._context_tokens)
        return sequence


def expand_prompt(
    token_ids: tuple[int, ...], images: tuple[ImageEmbedding, ...], image_token_id: int | None
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """The prompt with each image token repeated once per row of its features, and where the images stand.

    Raises:
        InvalidPrompt: not as many image tokens as images.
    """
    num_marks = token_ids.count(image_token_id) if image_token_id is not None else 0
    if num_marks != len(images):
        raise InvalidPrompt(f"the prompt has {num_marks} image tokens but {len(images)} images")
    expanded: list[int] = []
    spans: list[ImageSpan] = []
    for token_id in token_ids:
        if token_id != image_token_id:
            expanded.append(token_id)
            continue
        image = images[len(spans)]
        spans.append(ImageSpan(len(expanded), len(expanded) + image.features.shape[0], image))
        expanded.extend([token_id] * image.features.shape[0])
    return expanded, tuple(spans)


def check_prompt(request: DecodeRequest, num_prompt_tokens: int, config: DecoderConfig, context_tokens: int) -> None:
    """Pass a request that the model can compute; `num_prompt_tokens` counts the images' rows.

    Raises:
        InvalidPrompt: an empty prompt, one too long for the context, a token id outside the vocabulary, or
            features of the wrong shape or with a value that is not finite.
    """
    if num_prompt_tokens == 0:
        raise InvalidPrompt("the prompt is empty")
    if num_prompt_tokens >= context_tokens:
        raise InvalidPrompt(
            f"the prompt has {num_prompt_tokens} tokens; the context of {context_tokens} must hold it and at "
            "least one more"
        )
    for token_id in (*request.token_ids, *request.generated_ids):
        if not 0 <= token_id < config.vocab_size and token_id != config.image_token_id:
            raise InvalidPrompt(f"token id {token_id} is outside the vocabulary of {config.vocab_size}")
    for index, image in enumerate(request.images):
        shape = tuple(image.features.shape)
        if len(shape) != 2 or shape[0] == 0 or shape[1] != config.width:
            raise InvalidPrompt(f"the features of image {index} are {shape}, not (tokens, {config.width})")
        if not bool(image.features.isfinite().all()):
            raise InvalidPrompt(f"the features of image {index} are not finite")


def reason_to_end(sequence: Sequence, now_s: float) -> RelayError | None:
    """Why a sequence must end before its next token, if so; `now_s` is on the engine's clock."""
    request_id, deadline_s = sequence.request.request_id, sequence.request.deadline_s
    if sequence.is_cancelled:
        return Cancelled(f"{request_id}: cancelled")
    if deadline_s is not None and now_s >= deadline_s:
        return DeadlineExceeded(f"{request_id}: {sequence.num_generated} tokens by the deadline")
    return None
