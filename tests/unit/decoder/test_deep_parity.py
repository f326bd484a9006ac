"""Greedy tokens equal transformers' for every architecture served, several images, turns and random schedules."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlavaForConditionalGeneration, MistralConfig

from tests.unit.decoder.conftest import (
    BOS,
    IMAGE,
    IMAGE_TOKENS,
    Case,
    Receiver,
    StartEngine,
    answer,
    make_case,
    random_model,
    save,
)

ARCHITECTURES: dict[str, tuple[type[LlamaConfig] | type[MistralConfig], dict[str, object]]] = {
    "every_head_its_own_key": (LlamaConfig, {"num_key_value_heads": 4}),
    "one_key_for_all_heads": (LlamaConfig, {"num_key_value_heads": 1}),
    "wide_heads": (LlamaConfig, {"head_dim": 64}),
    "odd_heads": (LlamaConfig, {"head_dim": 24}),
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "biases": (LlamaConfig, {"attention_bias": True}),
    "other_theta": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear_rope": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama3_rope": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "mistral_with_window": (MistralConfig, {"sliding_window": 128, "head_dim": 16}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_equals_transformers(start_engine: StartEngine, tmp_path: Path, name: str) -> None:
    text_class, values = ARCHITECTURES[name]
    model = random_model(text_class, **values)
    cases = [make_case(model, seed, 10 + 7 * seed, seed, 12) for seed in range(3)]
    harness = start_engine(save(model, tmp_path))

    receivers = [harness.submit(case, str(index), max_tokens=12) for index, case in enumerate(cases)]

    assert [receiver.token_ids() for receiver in receivers] == [case.answer for case in cases]


def test_several_and_repeated_images_equal_transformers(
    start_engine: StartEngine, model: LlavaForConditionalGeneration
) -> None:
    text = (20, 30, 40)
    cases = [
        answer(model, (BOS, IMAGE, IMAGE, *text), (1, 2)),
        answer(model, (BOS, IMAGE, IMAGE, *text), (2, 1)),
        answer(model, (BOS, IMAGE, IMAGE, *text), (1, 1)),
        answer(model, (BOS, IMAGE, *text, IMAGE, 50, IMAGE, IMAGE, 60), (1, 2, 3, 1)),
        answer(model, (IMAGE, *text), (1,)),
    ]
    harness = start_engine()

    for turn in range(2):  # the second time out of the prefix cache
        receivers = [harness.submit(case, f"{turn}/{index}") for index, case in enumerate(cases)]
        assert [receiver.token_ids() for receiver in receivers] == [case.answer for case in cases]

    assert len({case.answer for case in cases}) == len(cases)


def test_turns_of_a_conversation_equal_transformers_and_reuse_its_blocks(
    start_engine: StartEngine, model: LlavaForConditionalGeneration
) -> None:
    harness = start_engine()
    ids: tuple[int, ...] = (BOS, IMAGE, 20, 30)
    for turn in range(4):
        case = answer(model, ids, (5,), max_tokens=12)

        receiver = harness.submit(case, max_tokens=12)

        assert receiver.token_ids() == case.answer
        num_known = len(ids) - 1 + IMAGE_TOKENS - len((70 + turn - 1, 80)) if turn else 0
        cached = receiver.deltas[-1].num_cached_tokens
        assert cached == (num_known - 1) // 4 * 4 if turn else cached == 0
        ids = (*ids, *case.answer, 70 + turn, 80)


@pytest.mark.parametrize("seed", range(6))
def test_a_random_schedule_equals_transformers(start_engine: StartEngine, cases: list[Case], seed: int) -> None:
    chance = random.Random(seed)
    max_sequences = chance.randint(1, 16)
    harness = start_engine(
        block_tokens=chance.choice([1, 3, 8, 16]),
        num_blocks=chance.randint(35, 120) * 4,
        max_sequences=max_sequences,
        max_step_tokens=max_sequences + chance.choice([1, 10, 60, 1000]),
        prefix_cache=chance.random() < 0.7,
        compile=chance.random() < 0.7,
        context_tokens=130,
    )
    order = [chance.randrange(len(cases)) for _ in range(40)]
    cancelled = {place for place in range(len(order)) if chance.random() < 0.2}
    receivers: list[Receiver] = []

    for place, index in enumerate(order):
        receivers.append(harness.submit(cases[index], str(place)))
        if chance.random() < 0.3:
            receivers[chance.randrange(len(receivers))].wait()
        if place in cancelled:
            harness.engine.cancel(str(place))

    for place, index in enumerate(order):
        got, wanted = receivers[place].token_ids(), cases[index].answer
        error = receivers[place].deltas[-1].error
        assert got == (wanted if error is None else wanted[: len(got)])
        assert error is None or (place in cancelled and error.code == "CANCELLED")


@pytest.mark.slow
def test_two_hundred_prompts_equal_transformers(
    start_engine: StartEngine, model: LlavaForConditionalGeneration
) -> None:
    cases = [make_case(model, seed, 5 + seed % 60, seed % 4, 32) for seed in range(1000, 1200)]
    harness = start_engine(num_blocks=200, max_step_tokens=100)

    receivers = [harness.submit(case, str(index), max_tokens=32) for index, case in enumerate(cases)]

    assert [receiver.token_ids() for receiver in receivers] == [case.answer for case in cases]
