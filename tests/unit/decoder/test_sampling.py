"""Sampling agrees with transformers' processors, and a seed gives the same tokens everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from python_backend.decoder.sampling import choose_token, choose_tokens, draw, filtered, penalize, uniform
from python_backend.decoder.sequence import DecodeRequest, Sequence
from python_backend.request import SamplingParameters
from tests.unit.decoder.conftest import EOS, VOCABULARY, byte_tokenizer

TOKENIZER = byte_tokenizer()


def make_sequence(prompt: list[int], generated: list[int], seed: int = 5, **sampling: object) -> Sequence:
    request = DecodeRequest("r", tuple(prompt), (), SamplingParameters(**sampling), None, tuple(generated))  # type: ignore[arg-type]
    return Sequence(request, lambda delta: None, 0, (prompt, ()), TOKENIZER, seed)


def random_logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (0.9, 40, 0.9, 0.05)],
)
def test_the_filtered_distribution_equals_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(1)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)

    ordered, token_ids = (logits[0] / temperature).sort(descending=True)
    probabilities = filtered(ordered, top_k, top_p, min_p)
    found = torch.zeros(VOCABULARY, dtype=torch.double)
    found[token_ids[: len(probabilities)]] = probabilities

    torch.testing.assert_close(found, expected[0].double().softmax(0), rtol=1e-5, atol=1e-9)


def test_the_repetition_penalty_equals_transformers() -> None:
    logits = random_logits(2)
    sequence = make_sequence([4, 9, 9, 30], [40, 41], repetition_penalty=1.7)

    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([sequence.token_ids]), logits.clone())

    assert torch.equal(penalize(logits[0], sequence), expected[0])


def test_presence_and_frequency_count_the_answer_only() -> None:
    sequence = make_sequence([4, 9], [7, 7, 8], presence_penalty=0.5, frequency_penalty=0.25)

    penalized = penalize(torch.zeros(10), sequence).tolist()

    assert penalized == [0, 0, 0, 0, 0, 0, 0, -1.0, -0.75, 0]


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.2], dtype=torch.double)
    counts = [0, 0, 0]

    for index in range(20000):
        counts[draw(probabilities, uniform(11, index))] += 1

    for count, probability in zip(counts, probabilities.tolist(), strict=True):
        assert abs(count / 20000 - probability) < 4 * math.sqrt(probability * (1 - probability) / 20000)


def test_a_draw_never_takes_a_token_without_probability() -> None:
    probabilities = torch.tensor([0.5, 0.5 - 1e-17, 0.0], dtype=torch.double)

    assert [draw(probabilities, point) for point in (0.0, 0.5, 1 - 2**-53)] == [0, 1, 1]


def test_a_seed_gives_the_same_token_alone_and_in_any_batch() -> None:
    logits = random_logits(3, num_rows=8)
    sequences = [make_sequence([4], [5] * row, seed=row, temperature=1.0, top_p=0.95) for row in range(8)]

    together = choose_tokens(logits, sequences, frozenset({EOS}))
    alone = [choose_tokens(logits[row : row + 1], [each], frozenset({EOS}))[0] for row, each in enumerate(sequences)]

    assert together == alone
    assert len({choice.chosen.token_id for choice in together if choice}) > 3


def test_until_min_tokens_nothing_ends_the_answer() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[EOS], logits[50], logits[60] = 9.0, 8.0, 7.0

    tokens = [
        choose_token(logits, make_sequence([4], generated, min_tokens=2, stop_token_ids=(50,)), frozenset({EOS}))
        for generated in ([], [5], [5, 5])
    ]

    assert tokens == [60, 60, EOS]


def test_logprobs_are_those_before_penalties_with_ranks() -> None:
    logits = random_logits(4)
    expected = logits.log_softmax(1)[0]
    best = expected.topk(3)
    sequence = make_sequence([int(best.indices[0])], [], repetition_penalty=100.0, logprobs=3)

    (choice,) = choose_tokens(logits, [sequence], frozenset({EOS}))

    assert choice is not None
    assert [(each.token_id, each.rank) for each in choice.top] == [
        (int(token_id), place) for place, token_id in enumerate(best.indices, start=1)
    ]
    assert [each.logprob for each in choice.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert choice.chosen == choice.top[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_spoil_their_own_row_only(bad: float) -> None:
    logits = random_logits(5, num_rows=3)
    logits[1, 17] = bad

    choices = choose_tokens(logits, [make_sequence([4], []) for _ in range(3)], frozenset({EOS}))

    assert [choice is None for choice in choices] == [False, True, False]
