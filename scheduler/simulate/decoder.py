"""A simulated language decoder: continuous batching over a paged cache, by the engine's own rules.

It does what `python_backend.decoder.batch` does step by step, but steps that only repeat each other are reckoned at
once: a run ends when a sequence ends, when the cache may not hold another step, or with the step during which one
arrives that may start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from scheduler.simulate.agenda import Agenda
from scheduler.simulate.decode_run import DecodeRun, Rates
from scheduler.simulate.encoder import NoteSpan
from scheduler.simulate.sequence import SimulatedSequence
from scheduler.simulate.silicon import Silicon, Work
from scheduler.step import PromptBudget, count_free_tokens, may_admit

PrefillRates = tuple[float, float, float]
"""Start of a step's prompts, per token, per token squared; in seconds."""


class SimulatedDecoder:
    """One replica. Sequences that run are kept oldest first."""

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        silicon: Silicon,
        rates: tuple[Rates, PrefillRates],
        limits: tuple[int, int, float],
        cache: tuple[int, int],
    ) -> None:
        self.name = name
        self.work = Work(agenda, silicon, "decode", self._step_done)
        self.waiting: deque[SimulatedSequence] = deque()
        self.running: dict[SimulatedSequence, None] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self._began_s = 0.0  # of the step or run that goes on
        self._agenda = agenda
        self._rates, self._prefill = rates
        self._max_sequences, self._max_step_tokens, step_limit_s = limits
        self._free_blocks, self._block_tokens = cache
        self.total_blocks = self._free_blocks
        self._budget = PromptBudget(step_limit_s, self._max_step_tokens)
        self._started: deque[SimulatedSequence] = deque()  # prompts that are begun, oldest first
        self._ends: list[tuple[int, int, SimulatedSequence]] = []  # heap by finish step
        self._serial = 0
        self._num_decoding = 0
        self._context = 0  # tokens that the next step reads, its own included
        self._phases = [0] * self._block_tokens  # of decoding sequences: (computed - step) modulo block
        self._run: DecodeRun | None = None
        self._chunks: list[tuple[SimulatedSequence, int]] = []
        self._num_cancelled = 0
        self.is_dead = False
        self.span: NoteSpan | None = None
        self.told: Callable[[int], None] | None = None  # how many tokens were given beside first ones

    @property
    def free_blocks(self) -> int:
        """Of the cache."""
        return self._free_blocks

    def push(self, sequence: SimulatedSequence) -> None:
        """Queues a sequence behind all others."""
        self.waiting.append(sequence)
        if not self.work.is_active:
            if not self.is_dead:
                self._choose()
        elif self._run is not None and len(self.waiting) == 1 and self._has_room(sequence):
            self._cut_run()

    def cancel(self, sequence: SimulatedSequence) -> int:
        """Has a sequence end with the step that goes on; the tokens that it gave."""
        sequence.is_cancelled = True
        self._num_cancelled += 1
        num_ahead = 0  # steps of the run that are done
        if self._run is not None:
            self._cut_run()
            num_ahead = self._run.num_steps - 1
        since = self.num_steps + num_ahead - sequence.join_step if sequence.join_step >= 0 else 0
        return sequence.num_given + since

    def die(self) -> list[SimulatedSequence]:
        """Loses all its work; the sequences that it had, with what they gave."""
        if self._run is not None:
            self._run.cut(self.work.elapsed_s())
            self._advance(max(0, self._run.num_steps - 1))
        self.work.stop()
        lost = [*self.running, *self.waiting]
        for sequence in self.running:
            self._note_given(sequence)
        self.waiting.clear()
        self.running.clear()
        self._started.clear()
        self._ends.clear()
        self._chunks, self._run = [], None
        self._num_decoding = self._context = self._num_cancelled = 0
        self._phases = [0] * self._block_tokens
        self._free_blocks = self.total_blocks
        return lost

    # -- the end of a step --------------------------------------------------------------------------------

    def _step_done(self) -> None:
        duration_s = self._agenda.now_s - self._began_s
        run, chunks, num_decoding = self._run, self._chunks, self._num_decoding
        num_prompt_tokens = sum([tokens for _, tokens in chunks]) if chunks else 0
        if self.span is not None:
            self.span(self.name, self._began_s, 0, num_decoding, num_prompt_tokens)
        if run is not None:
            self._run = None
            num_steps = run.num_steps
            last_s = run.last_s() if num_steps > 1 else duration_s
            self._budget.learn(num_decoding, 0, last_s, num_steps)
            self._advance(num_steps)
        else:
            self._budget.learn(num_decoding, num_prompt_tokens, duration_s)
            self._advance(1 if num_decoding else 0)
            self.num_steps += not num_decoding
            self._chunks = []
        ends, num_steps = self._ends, self.num_steps
        while ends and ends[0][0] <= num_steps:
            finish_step, _, sequence = heappop(ends)
            if sequence.finish_step == finish_step and sequence.join_step >= 0:
                self._end(sequence)
                if not sequence.is_cancelled:
                    sequence.job.finished(sequence)
        for sequence, num_tokens in chunks:
            self._complete(sequence, num_tokens)
        if self._num_cancelled:
            self._drop_cancelled()
        self._choose()

    def _advance(self, num_steps: int) -> None:
        """Counts steps of all that decode; the blocks of the first were taken before it."""
        self._free_blocks -= self._blocks_for(num_steps) if num_steps > 1 else 0
        self.num_steps += num_steps
        self._context += num_steps * self._num_decoding
        if self.told is not None:
            self.told(num_steps * self._num_decoding)

    def _blocks_for(self, num_steps: int) -> int:
        """Blocks that the second to the last of so many steps need."""
        size, phases = self._block_tokens, self._phases
        rounds, rest = divmod(num_steps - 1, size)
        first = -(self.num_steps + rest) % size  # of the phases that need one in the `rest` steps, which come in a row
        last = first + rest
        some = sum(phases[first:last]) if last <= size else sum(phases[first:]) + sum(phases[: last - size])
        return rounds * self._num_decoding + some

    def _complete(self, sequence: SimulatedSequence, num_tokens: int) -> None:
        """A chunk is in the cache; the last one of a prompt gives a token."""
        sequence.num_computed += num_tokens
        if sequence.num_computed < sequence.known:
            return
        self._started.remove(sequence)
        if sequence.is_cancelled:
            self._release(sequence, sequence.num_computed)
            return
        sequence.left -= 1
        sequence.num_given += 1
        sequence.known += 1
        if sequence.left == 0:
            self._release(sequence, sequence.num_computed)
            sequence.job.token(sequence)
            sequence.job.finished(sequence)
            return
        sequence.join_step = self.num_steps
        sequence.finish_step = self.num_steps + sequence.left
        self._num_decoding += 1
        self._context += sequence.num_computed + 1
        self._phases[(sequence.num_computed - self.num_steps) % self._block_tokens] += 1
        self._serial += 1
        heappush(self._ends, (sequence.finish_step, self._serial, sequence))
        sequence.job.token(sequence)

    def _end(self, sequence: SimulatedSequence) -> None:
        """Takes a sequence out that decodes, with what it gave."""
        num_computed = sequence.num_computed + self.num_steps - sequence.join_step
        self._num_decoding -= 1
        self._context -= num_computed + 1
        self._phases[(sequence.num_computed - sequence.join_step) % self._block_tokens] -= 1
        self._note_given(sequence)
        self._release(sequence, num_computed)

    def _note_given(self, sequence: SimulatedSequence) -> None:
        if sequence.join_step >= 0:
            given = self.num_steps - sequence.join_step
            sequence.num_given += given
            sequence.known += given
            sequence.left -= given
            sequence.join_step = -1

    def _release(self, sequence: SimulatedSequence, num_computed: int) -> None:
        self._free_blocks += max(sequence.blocks, -(-num_computed // self._block_tokens))
        del self.running[sequence]

    def _drop_cancelled(self) -> None:
        for sequence in [sequence for sequence in self.running if sequence.is_cancelled]:
            self._take_out(sequence)
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.is_cancelled)
        self._num_cancelled = 0

    def _take_out(self, sequence: SimulatedSequence) -> None:
        if sequence.join_step >= 0:
            self._end(sequence)
        else:
            self._started.remove(sequence)
            self._release(sequence, sequence.num_computed)

    # -- the next step ------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Starts the next step, or a run of steps."""
        has_preempted = self._grow() if self._num_decoding else False
        chunks, num_last = self._choose_chunks(has_preempted) if self._started or self.waiting else ([], 0)
        self._began_s = self._agenda.now_s
        if chunks:
            self._chunks = chunks
            self.work.begin(self._step_seconds(chunks, num_last))
        elif self._num_decoding:
            self._run = run = DecodeRun(self._rates, self._num_decoding, self._context, self._longest_run())
            self.work.begin(run.total_s)

    def _choose_chunks(self, has_preempted: bool) -> tuple[list[tuple[SimulatedSequence, int]], int]:
        """What of which prompts is computed; the first so many chunks are the last tokens of their prompts."""
        # A prompt with one token left is to the engine like a sequence that decodes.
        chunks = [(sequence, 1) for sequence in self._started if 0 < sequence.num_computed == sequence.known - 1]
        num_last = len(chunks)
        num_free = count_free_tokens(self._num_decoding + num_last, self._max_step_tokens, self._budget)
        for sequence in self._started:
            if num_free > 0 and not 0 < sequence.num_computed == sequence.known - 1:
                chunks.append((sequence, min(num_free, sequence.known - sequence.num_computed)))
                num_free -= chunks[-1][1]
        while not has_preempted and num_free > 0 and self.waiting and self._has_room(self.waiting[0]):
            sequence = self._admit()
            chunks.append((sequence, min(num_free, sequence.known)))
            num_free -= chunks[-1][1]
        return chunks, num_last

    def _step_seconds(self, chunks: list[tuple[SimulatedSequence, int]], num_last: int) -> float:
        """The first `num_last` chunks are the last tokens of their prompts."""
        start_s, token_s, squared_s = self._prefill
        seconds = start_s if len(chunks) > num_last else 0.0
        for sequence, num_tokens in chunks[num_last:]:
            seconds += num_tokens * (token_s + squared_s * (2 * sequence.num_computed + num_tokens))
        num_decoding, context = self._num_decoding + num_last, self._context
        if num_last:
            context += sum([sequence.num_computed + 1 for sequence, _ in chunks[:num_last]])
        if num_decoding:
            step_s, weight_s, context_s, sequence_s = self._rates
            seconds += step_s + max(weight_s + context * context_s, num_decoding * sequence_s)
        return seconds

    def _has_room(self, sequence: SimulatedSequence) -> bool:
        num_blocks = -(-sequence.known // self._block_tokens)
        return may_admit(len(self.running), self._max_sequences, num_blocks, self._free_blocks)

    def _admit(self) -> SimulatedSequence:
        sequence = self.waiting.popleft()
        sequence.blocks = -(-sequence.known // self._block_tokens)
        sequence.num_computed = 0
        self._free_blocks -= sequence.blocks
        self.running[sequence] = None
        self._started.append(sequence)
        return sequence

    def _grow(self) -> bool:
        """Takes the blocks of the next step's tokens; whether that preempted the newest sequences."""
        step, size = self.num_steps, self._block_tokens
        has_preempted = False
        while (needed := self._phases[-step % size]) > self._free_blocks:
            victim = next(reversed(self.running))
            self._take_out(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            has_preempted = True
        self._free_blocks -= needed
        return has_preempted

    def _longest_run(self) -> int:
        """Steps until a sequence ends or the cache might not hold one more."""
        ends = self._ends
        while (finish_step := ends[0][0]) != ends[0][2].finish_step or ends[0][2].join_step < 0:
            heappop(ends)  # was preempted or cancelled meanwhile
        longest = finish_step - self.num_steps
        num_rounds = (longest - 1) // self._block_tokens + 1
        if num_rounds * self._num_decoding <= self._free_blocks:
            return longest
        left, step = self._free_blocks, self.num_steps
        for index in range(1, longest):
            left -= self._phases[-(step + index) % self._block_tokens]
            if left < 0:
                return index
        return longest

    def _cut_run(self) -> None:
        run = self._run
        assert run is not None
        if run.num_steps > 1:
            seconds = run.cut(self.work.elapsed_s())
            self.work.shorten(seconds)
