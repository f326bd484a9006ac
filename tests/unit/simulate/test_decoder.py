"""The simulated decoder does what the engine's own step chooser does, step for step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.decoder.batch import StepChooser
from python_backend.decoder.kv_cache import BlockPool
from scheduler.cost import ContentionCost
from scheduler.simulate.agenda import Agenda
from scheduler.simulate.decode_run import DecodeRun
from scheduler.simulate.decoder import SimulatedDecoder
from scheduler.simulate.sequence import SimulatedSequence
from scheduler.simulate.silicon import Silicon

BLOCK_TOKENS = 4
DECODE = (0.001, 0.010, 0.0001, 0.004)
PREFILL = (0.002, 0.0005, 0.00001)
Times = list[tuple[float, float]]


@dataclass(frozen=True)
class Asked:
    """A sequence that arrives."""

    after_s: float  # the one before
    prompt_tokens: int
    output_tokens: int


@dataclass
class Stepped:
    """What the step chooser asks of a sequence, without tokens."""

    num_prompt_tokens: int
    num_tokens: int
    last: int  # tokens when it ends
    request: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(request_id="r"))
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached_tokens: int | None = 0
    first_s: float = -1.0
    end_s: float = -1.0

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_computed > 0 and self.num_uncomputed == 1

    def restart(self) -> None:
        self.blocks, self.num_computed = [], 0


def stepped(asked: list[Asked], num_blocks: int, max_sequences: int, step_tokens: int) -> tuple[Times, int]:
    """By the engine's chooser, one step after the other: first and last token of each, and the preemptions."""
    chooser = StepChooser(BlockPool(num_blocks), BLOCK_TOKENS, max_sequences, step_tokens, shares_prefixes=False)
    every, arrivals, now_s = [], [], 0.0
    for each in asked:
        now_s += each.after_s
        every.append(Stepped(each.prompt_tokens, each.prompt_tokens, each.prompt_tokens + each.output_tokens))
        arrivals.append((now_s, every[-1]))
    now_s = 0.0
    while arrivals or chooser.running or chooser.waiting:
        if not chooser.running and not chooser.waiting:
            now_s = max(now_s, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now_s:
            chooser.add(arrivals.pop(0)[1])  # type: ignore[arg-type]
        chunks = chooser.choose()
        decodes = [chunk for chunk in chunks if chunk.sequence.is_decoding]
        prompts = [chunk for chunk in chunks if not chunk.sequence.is_decoding]
        if prompts:
            start_s, token_s, squared_s = PREFILL
            now_s += start_s + sum(c.num_tokens * token_s + squared_s * (c.end**2 - c.start**2) for c in prompts)
        if decodes:
            step_s, weight_s, context_s, sequence_s = DECODE
            context = sum(chunk.end for chunk in decodes)
            now_s += step_s + max(weight_s + context * context_s, len(decodes) * sequence_s)
        for chunk in chunks:
            gives_token = chunk.gives_token
            chooser.complete(chunk)
            if gives_token:
                sequence: Stepped = chunk.sequence  # type: ignore[assignment]
                sequence.num_tokens += 1
                sequence.first_s = now_s if sequence.first_s < 0 else sequence.first_s
                if sequence.num_tokens == sequence.last:
                    sequence.end_s = now_s
                    chooser.remove(sequence)  # type: ignore[arg-type]
    return [(each.first_s, each.end_s) for each in every], chooser.num_preemptions


class Receiver:
    """Notes when its tokens came."""

    def __init__(self, agenda: Agenda) -> None:
        self.agenda = agenda
        self.first_s = self.end_s = -1.0
        self.num_given = 0

    def token(self, sequence: SimulatedSequence) -> None:
        self.first_s = self.agenda.now_s if self.first_s < 0 else self.first_s

    def finished(self, sequence: SimulatedSequence) -> None:
        assert self.end_s < 0
        self.end_s = self.agenda.now_s
        self.num_given = sequence.num_given


def decoder(agenda: Agenda, num_blocks: int, max_sequences: int, step_tokens: int) -> SimulatedDecoder:
    silicon = Silicon(ContentionCost())
    limits = (max_sequences, step_tokens, 1e9)  # no limit on a step's time: costs play no part in the choice
    return SimulatedDecoder("d", agenda, silicon, (DECODE, PREFILL), limits, (num_blocks, BLOCK_TOKENS))


def simulated(asked: list[Asked], num_blocks: int, max_sequences: int, step_tokens: int) -> tuple[Times, int]:
    agenda = Agenda()
    made = decoder(agenda, num_blocks, max_sequences, step_tokens)
    receivers, now_s = [Receiver(agenda) for _ in asked], 0.0
    for each, receiver in zip(asked, receivers, strict=True):
        now_s += each.after_s
        agenda.run_until(now_s)
        made.push(SimulatedSequence(receiver, each.prompt_tokens, each.output_tokens))
    agenda.run_until(1e6)
    assert [receiver.num_given for receiver in receivers] == [each.output_tokens for each in asked]
    assert made.free_blocks == num_blocks
    assert not made.running
    assert not made.waiting
    return [(receiver.first_s, receiver.end_s) for receiver in receivers], made.num_preemptions


askeds = st.lists(
    st.builds(
        Asked,
        after_s=st.floats(0.001, 0.3).map(lambda value: value * 1.0000317),  # never at the end of a step
        prompt_tokens=st.integers(1, 40),
        output_tokens=st.integers(1, 40),
    ),
    min_size=1,
    max_size=12,
)


@given(askeds, st.integers(20, 60), st.integers(1, 6), st.integers(8, 64))
@settings(max_examples=150)
def test_it_gives_each_token_when_the_engine_would(
    asked: list[Asked], num_blocks: int, max_sequences: int, step_tokens: int
) -> None:
    expected, preemptions = stepped(asked, num_blocks, max_sequences, step_tokens)

    times, num_preemptions = simulated(asked, num_blocks, max_sequences, step_tokens)

    assert num_preemptions == preemptions
    assert times == [pytest.approx(pair, rel=1e-9) for pair in expected]


def test_a_full_cache_preempts_the_newest_as_the_engine_does() -> None:
    asked = [Asked(0.01, 30, 40), Asked(0.01, 30, 40), Asked(0.01, 10, 40)]

    _, expected = stepped(asked, 20, 4, 64)
    _, num_preemptions = simulated(asked, 20, 4, 64)

    assert num_preemptions == expected > 0


@given(st.integers(1, 50), st.integers(0, 3000), st.integers(1, 60))
def test_a_run_takes_as_long_as_its_steps(num_sequences: int, context: int, num_steps: int) -> None:
    run = DecodeRun(DECODE, num_sequences, context, num_steps)
    step_s, weight_s, context_s, sequence_s = DECODE
    steps = [
        step_s + max(weight_s + (context + index * num_sequences) * context_s, num_sequences * sequence_s)
        for index in range(num_steps)
    ]

    assert run.seconds(num_steps) == pytest.approx(sum(steps))
    assert run.last_s() == pytest.approx(steps[-1])
    for cut in range(num_steps):
        again = DecodeRun(DECODE, num_sequences, context, num_steps)
        again.cut(sum(steps[:cut]) + steps[cut] / 2)
        assert again.num_steps == cut + 1


def test_a_cancelled_sequence_leaves_with_the_step_that_goes_on() -> None:
    agenda = Agenda()
    made = decoder(agenda, 100, 4, 64)
    receiver = Receiver(agenda)
    sequence = SimulatedSequence(receiver, 8, 1000)
    made.push(sequence)
    agenda.run_until(0.1)
    assert made.running

    made.cancel(sequence)
    agenda.run_until(0.1 + 0.02)

    assert not made.running
    assert made.free_blocks == 100
    assert receiver.end_s < 0
