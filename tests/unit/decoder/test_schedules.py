"""The whole engine over random arrivals, steps, cancels and deadlines: each request ends once, with its own tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from transformers import LlavaForConditionalGeneration

from python_backend.decoder.engine import DecodeRequest, Delta, Engine, EngineOptions
from python_backend.decoder.sequence import Sequence
from python_backend.errors import Overloaded
from python_backend.request import SamplingParameters
from tests.unit.decoder.conftest import BOS, IMAGE, Case, FakeClock, answer

MAX_TOKENS = 12
LONGEST = 56  # tokens of the longest prompt and its answer
MAX_STEPS = 3000  # far more than all requests of a schedule take one after the other


@dataclass
class Asked:
    """One request and what came of it."""

    case: Case
    max_tokens: int
    deadline_s: float | None
    is_cancelled: bool = False
    deltas: list[Delta] = field(default_factory=list)

    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for delta in self.deltas for token_id in delta.token_ids)


@pytest.fixture(scope="module")
def alike(model: LlavaForConditionalGeneration) -> list[Case]:
    """Prompts that begin alike, with the same picture and with another, and one that goes on from another's answer."""
    first = answer(model, (BOS, IMAGE, 20, 30, 40), (1,), MAX_TOKENS)
    return [
        first,
        answer(model, (BOS, IMAGE, 20, 30, 40), (2,), MAX_TOKENS),
        answer(model, (BOS, IMAGE, 20, 30, 41), (1,), MAX_TOKENS),
        answer(model, (BOS, *range(50, 70)), (), MAX_TOKENS),
        answer(model, (BOS, *range(50, 66), 90, 91, 92), (), MAX_TOKENS),
        answer(model, (*first.token_ids, *first.answer, 70), (1,), MAX_TOKENS),
    ]


class EngineMachine(RuleBasedStateMachine):
    """An engine whose thread is never started: each step is taken here."""

    def __init__(self, checkpoint: Path, cases: list[Case]) -> None:
        super().__init__()
        self.checkpoint, self.cases = checkpoint, cases
        self.clock = FakeClock()
        self.asked: dict[str, Asked] = {}

    @initialize(
        block_tokens=st.integers(1, 8),
        spare_blocks=st.integers(0, 12),
        max_sequences=st.integers(1, 5),
        spare_tokens=st.sampled_from([0, 3, 20, 200]),
        prefix_cache=st.booleans(),
    )
    def load(
        self, block_tokens: int, spare_blocks: int, max_sequences: int, spare_tokens: int, prefix_cache: bool
    ) -> None:
        options = EngineOptions(
            num_blocks=-(-LONGEST // block_tokens) + spare_blocks,
            block_tokens=block_tokens,
            max_sequences=max_sequences,
            max_step_tokens=max_sequences + spare_tokens,
            max_waiting=4,
            context_tokens=LONGEST,
            prefix_cache=prefix_cache,
        )
        self.limits = options
        self.engine = Engine.load(self.checkpoint, options, self.clock)

    def live(self) -> list[str]:
        return [name for name, each in self.asked.items() if not (each.deltas and each.deltas[-1].is_final)]

    @rule(
        index=st.integers(0, 5),
        max_tokens=st.integers(1, MAX_TOKENS),
        rank=st.sampled_from([0.0, 1.0]),
        allowed_s=st.sampled_from([None, None, None, 5.0, 20.0]),
    )
    def submit(self, index: int, max_tokens: int, rank: float, allowed_s: float | None) -> None:
        case, name = self.cases[index], str(len(self.asked))
        deadline_s = None if allowed_s is None else self.clock() + allowed_s
        asked = Asked(case, max_tokens, deadline_s)
        sampling = SamplingParameters(max_tokens=max_tokens)
        request = DecodeRequest(name, case.token_ids, case.images, sampling, deadline_s, rank=rank)
        if len(self.live()) == self.limits.max_sequences + self.limits.max_waiting:
            with pytest.raises(Overloaded):
                self.engine.submit(request, asked.deltas.append)
            return
        self.engine.submit(request, asked.deltas.append)
        self.asked[name] = asked

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live()))
        self.asked[name].is_cancelled = True
        assert self.engine.cancel(name)

    @rule(index=st.integers(0, 5))
    def change_ones_mind(self, index: int) -> None:
        """A prompt that is cut short, and asked for again: what was not computed of it must not be shared."""
        name = str(len(self.asked))
        self.submit(index, MAX_TOKENS, 0.0, None)
        self.step()
        if name in self.live():
            self.asked[name].is_cancelled = True
            self.engine.cancel(name)
        self.submit(index, MAX_TOKENS, 0.0, None)

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        chooser, now_s = self.engine._chooser, self.clock()
        self.engine._take_in()  # an urgent one that has just come may be first
        first = next(iter((*chooser.running, *chooser.waiting)), None)
        decoding = {each: each.num_generated for each in chooser.running if each.is_decoding}
        before = (first.num_computed, first.num_generated) if first is not None else (0, 0)

        self.engine.step()

        self.clock.now_s += 1.0
        if first is not None and not self.has_ended(first):
            assert (first.num_computed, first.num_generated) > before, "whoever is first always goes on"
        for sequence, num_generated in decoding.items():
            if sequence in chooser.running and not self.has_ended(sequence):
                assert sequence.num_generated == num_generated + 1, "who decodes gets a token in every step"
        self.check(now_s)

    def has_ended(self, sequence: Sequence) -> bool:
        return sequence.request.request_id not in self.live()

    def check(self, now_s: float) -> None:
        running, waiting = self.engine._chooser.running, self.engine._chooser.waiting
        self.engine.check_integrity()
        assert len(running) <= self.limits.max_sequences
        for sequence in running:
            assert sequence.num_computed <= len(sequence.blocks) * self.limits.block_tokens
            if sequence.times.started_s == now_s:
                passed_over = [each.request.rank for each in waiting if each.times.started_s is None]
                assert sequence.request.rank <= min(passed_over, default=sequence.request.rank), "the most urgent first"
        held = {block for sequence in running for block in sequence.blocks}
        status = self.engine.status()
        assert status.free_blocks == status.total_blocks - len(held)
        for name, asked in self.asked.items():
            assert not any(delta.is_final for delta in asked.deltas[:-1]), "nothing comes after the end"
            found = asked.token_ids()
            assert found == asked.case.answer[: len(found)]
            is_late = asked.deadline_s is not None and now_s >= asked.deadline_s
            if asked.is_cancelled or is_late:
                assert name not in self.live(), "what nobody waits for ends before its next step"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(MAX_STEPS):
            if not self.live():
                break
            self.step()
        assert not self.live(), "some requests never end"
        for asked in self.asked.values():
            error = asked.deltas[-1].error
            if error is None:
                assert asked.token_ids() == asked.case.answer[: asked.max_tokens]
            else:
                allowed = {"CANCELLED": asked.is_cancelled, "DEADLINE_EXCEEDED": asked.deadline_s is not None}
                assert allowed.get(error.code), error
        self.engine.close()
        status = self.engine.status()
        assert (status.free_blocks, status.num_running, status.num_waiting) == (status.total_blocks, 0, 0)


def test_any_schedule_ends_every_request_once_with_its_own_tokens(checkpoint: Path, alike: list[Case]) -> None:
    run_state_machine_as_test(
        lambda: EngineMachine(checkpoint, alike),
        settings=settings(max_examples=40, stateful_step_count=25),
    )


def test_what_was_not_computed_of_a_prompt_cut_short_is_not_shared(checkpoint: Path, alike: list[Case]) -> None:
    machine = EngineMachine(checkpoint, alike)
    machine.load(block_tokens=4, spare_blocks=12, max_sequences=2, spare_tokens=3, prefix_cache=True)

    machine.change_ones_mind(0)

    machine.teardown()
