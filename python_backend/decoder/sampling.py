"""The next token out of the logits: greedy or drawn, the same whatever else is in the batch.

Shapes: r = rows, v = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from hashlib import blake2b

import torch
from tokenizers import Tokenizer

from python_backend.decoder.sequence import RankedToken, Sequence, TokenLogprob


@dataclass(frozen=True, slots=True)
class Ranked:
    """A token, its log-probability before penalties and temperature, and its rank, from 1."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of a sequence; `top` has the most likely ones when the request asked for them."""

    chosen: Ranked
    top: tuple[Ranked, ...]


def choose_tokens(logits: torch.Tensor, sequences: Rows[Sequence], eos_ids: frozenset[int]) -> list[Choice | None]:
    """The next token of each sequence from its row of `logits` (r, v), float32; None if not finite.

    Each row is chosen from on its own, so that neighbours never change a token. Changes nothing.
    """
    normalizers = torch.logsumexp(logits, dim=1)  # NaN or infinite as soon as one logit is
    greedy = logits.argmax(dim=1).tolist()
    choices: list[Choice | None] = []
    are_finite = normalizers.isfinite().tolist()
    for row, sequence in enumerate(sequences):
        if not are_finite[row]:
            choices.append(None)
            continue
        token_id = greedy[row] if is_plain(sequence) else choose_token(logits[row], sequence, eos_ids)
        choices.append(_report(logits[row], normalizers[row], token_id, sequence.sampling.logprobs))
    return choices


def is_plain(sequence: Sequence) -> bool:
    """Whether its next token is simply the most likely one."""
    sampling = sequence.sampling
    return (
        sampling.temperature == 0
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and sequence.num_generated >= sampling.min_tokens
    )


def choose_token(logits: torch.Tensor, sequence: Sequence, eos_ids: frozenset[int]) -> int:
    """The next token from one row of logits (v,) after penalties, temperature and filters."""
    sampling = sequence.sampling
    penalized = penalize(logits, sequence)
    if sequence.num_generated < sampling.min_tokens:
        ends = [token_id for token_id in ends_of(sequence, eos_ids) if token_id < len(logits)]
        penalized[ends] = -torch.inf
    if sampling.temperature == 0:
        return int(penalized.argmax())
    ordered, token_ids = (penalized / sampling.temperature).sort(descending=True, stable=True)
    probabilities = filtered(ordered, sampling.top_k, sampling.top_p, sampling.min_p)
    place = draw(probabilities, uniform(sequence.seed, sequence.num_generated))
    return int(token_ids[place])


def ends_of(sequence: Sequence, eos_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that would end the sequence."""
    stop_ids = frozenset(sequence.sampling.stop_token_ids)
    return stop_ids if sequence.sampling.ignore_eos else stop_ids | eos_ids


def penalize(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """A copy of the logits (v,) with the penalties for tokens that were there already.

    Repetition (arXiv:1909.05858) looks at prompt and answer; presence and frequency, as in OpenAI's
    interface, at the answer only.
    """
    sampling = sequence.sampling
    penalized = logits.clone()
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(sequence.token_ids)), device=logits.device)
        seen = seen[seen < len(logits)]
        values = penalized[seen]
        penalty = sampling.repetition_penalty
        penalized[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (sampling.presence_penalty != 0 or sampling.frequency_penalty != 0) and sequence.num_generated:
        generated = torch.tensor(sequence.generated_ids(), device=logits.device)
        counts = torch.bincount(generated, minlength=len(logits)).to(logits.dtype)
        penalized -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    return penalized


def filtered(ordered: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The probabilities, adding up to 1, of the tokens kept out of logits in descending order.

    They are the first so many: `top_k` keeps that many, then `top_p` the fewest whose probabilities add up to
    it, then `min_p` those with at least that part of the first one's probability.
    """
    if top_k:
        ordered = ordered[:top_k]
    probabilities = torch.softmax(ordered.double(), dim=0)
    if top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        kept = probabilities[before < top_p]
        probabilities = kept / kept.sum()
    if min_p > 0:
        kept = probabilities[probabilities >= min_p * probabilities[0]]
        probabilities = kept / kept.sum()
    return probabilities


def draw(probabilities: torch.Tensor, point: float) -> int:
    """The place whose part of the interval [0, 1) holds `point`; parts are laid out in order."""
    bounds = probabilities.cumsum(0)
    place = int(torch.searchsorted(bounds, torch.tensor(point, dtype=bounds.dtype, device=bounds.device), right=True))
    return min(place, len(bounds) - 1)


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that belongs to a seed and the index of a generated token.

    A counter instead of a state: the same after a preemption or a move to another decoder.
    """
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def describe(choice: Choice, tokenizer: Tokenizer) -> TokenLogprob:
    """The choice with the text of each of its tokens."""

    def text(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    chosen = choice.chosen
    top = tuple(RankedToken(each.token_id, each.logprob, each.rank, text(each.token_id)) for each in choice.top)
    return TokenLogprob(chosen.token_id, chosen.logprob, chosen.rank, text(chosen.token_id), top)


def _report(logits: torch.Tensor, normalizer: torch.Tensor, token_id: int, num_top: int | None) -> Choice:
    logit = logits[token_id]
    if num_top is None:
        return Choice(Ranked(token_id, float(logit - normalizer), 0), ())
    rank = int((logits > logit).sum()) + 1
    values, token_ids = logits.topk(min(num_top, len(logits)))
    best = zip(token_ids.tolist(), (values - normalizer).tolist(), strict=True)
    top = tuple(Ranked(other_id, value, place) for place, (other_id, value) in enumerate(best, start=1))
    return Choice(Ranked(token_id, float(logit - normalizer), rank), top)
