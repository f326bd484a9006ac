"""Prompts are cut so that running decodes get their tokens in time."""

from __future__ import annotations

import threading

from python_backend.decoder.batch import Chunk
from python_backend.decoder.engine import Delta
from python_backend.decoder.runner import Outcome
from scheduler.step import MIN_TOKENS, PromptBudget
from tests.unit.decoder.conftest import Case, Receiver, StartEngine


def test_a_step_fits_its_limit_once_costs_are_known() -> None:
    budget = PromptBudget(limit_s=0.5, max_tokens=1000)
    assert budget.tokens(num_decodes=4) == 1000

    budget.learn(num_decodes=4, num_prompt_tokens=0, duration_s=0.1)
    budget.learn(num_decodes=4, num_prompt_tokens=500, duration_s=1.1)

    assert budget.tokens(num_decodes=4) == 200
    assert budget.tokens(num_decodes=0) == 1000


def test_prompts_go_on_however_slow_the_decodes_are() -> None:
    budget = PromptBudget(limit_s=0.5, max_tokens=1000)
    budget.learn(num_decodes=4, num_prompt_tokens=0, duration_s=2.0)
    budget.learn(num_decodes=4, num_prompt_tokens=100, duration_s=3.0)

    assert budget.tokens(num_decodes=4) == MIN_TOKENS


def test_the_engine_cuts_a_prompt_beside_a_running_decode(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine(step_limit_s=0.5)
    runner, sizes = harness.engine._runner, []
    run = runner.run

    def timed_run(chunks: list[Chunk]) -> list[Outcome]:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        sizes.append(num_tokens)
        harness.clock.now_s += 0.01 * num_tokens
        return run(chunks)

    runner.run = timed_run  # type: ignore[method-assign]
    first, started = Receiver(), threading.Event()

    def submit_second(_: Delta) -> None:
        if not started.is_set():
            started.set()
            harness.submit(cases[14], "second", second)  # 94 tokens

    second = Receiver()
    first.on_delta = submit_second
    harness.submit(cases[1], "first", first)

    assert first.token_ids() == cases[1].answer
    assert second.token_ids() == cases[14].answer
    assert sizes[0] == 26
    assert sizes[1:3] == [1 + 50, 1 + 44]
