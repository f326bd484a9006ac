"""What the next step computes: the step chooser, its queue, and the blocks it hands out."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from python_backend.decoder.kv_cache import BlockPool
from python_backend.decoder.sequence import Sequence
from scheduler.step import PromptBudget, count_free_tokens, may_admit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `start + num_tokens` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens

    @property
    def gives_token(self) -> bool:
        """Whether its last token is the newest known one, so that its logits choose the next."""
        return self.end == self.sequence.num_tokens


class StepChooser:
    """The sequences in the engine, and which of their tokens each step computes. Owned by the engine thread.

    Running sequences are kept oldest first and hold blocks for all their known tokens but the newest; waiting
    ones hold none. A running sequence without room for its next token takes the newest one's blocks, whose
    tokens are computed again later, so the oldest always goes on.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        max_sequences: int,
        max_step_tokens: int,
        shares_prefixes: bool,
        num_ahead: int = 0,
    ) -> None:
        """`num_ahead`: tokens beyond the newest whose blocks a decoding sequence takes too, while there are some."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of all admitted sequences
        self.num_cached_tokens = 0  # of those, found in the cache
        self._pool = pool
        self._block_tokens = block_tokens
        self._max_sequences = max_sequences
        self._max_step_tokens = max_step_tokens
        self._shares_prefixes = shares_prefixes
        self._num_ahead = num_ahead

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others of its rank or a smaller one, and behind preempted ones."""
        index = len(self.waiting)
        while index > 0 and self._comes_before(sequence, self.waiting[index - 1]):
            index -= 1
        self.waiting.insert(index, sequence)

    def remove(self, sequence: Sequence, is_poisoned: bool = False) -> list[int]:
        """Take a sequence out and give its blocks back; the result is those that nobody else holds.

        A poisoned one's blocks are not shared with later sequences.
        """
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return []
        self.running.remove(sequence)
        return self._give_back(sequence, is_poisoned)

    def choose(self, budget: PromptBudget | None = None) -> list[Chunk]:
        """The chunks of the next step: running decodes first, then started prompts, then waiting ones."""
        preemptions = self.num_preemptions
        chunks = [
            Chunk(sequence, sequence.num_computed, 1)
            for sequence in [sequence for sequence in self.running if sequence.is_decoding]
            if sequence in self.running and self._grow(sequence)
        ]
        num_free = count_free_tokens(len(chunks), self._max_step_tokens, budget)
        for sequence in self.running:
            if not sequence.is_decoding and num_free > 0:
                num_free -= self._continue_prompt(sequence, num_free, chunks)
        while self.num_preemptions == preemptions and num_free > 0 and self._admit():
            num_free -= self._continue_prompt(self.running[-1], num_free, chunks)
        return chunks

    def complete(self, chunk: Chunk) -> None:
        """Note that a chunk is in the cache, and let others share the blocks that it filled."""
        sequence = chunk.sequence
        before = sequence.num_computed // self._block_tokens
        sequence.num_computed = chunk.end
        full = sequence.num_computed // self._block_tokens
        if self._shares_prefixes and full > before:
            keys = list(sequence.block_keys(self._block_tokens, full))
            for index in range(before, full):
                self._pool.publish(sequence.blocks[index], keys[index])

    @staticmethod
    def _comes_before(new: Sequence, waiting: Sequence) -> bool:
        was_preempted = waiting.num_cached_tokens is not None
        return not was_preempted and new.request.rank < waiting.request.rank

    def _continue_prompt(self, sequence: Sequence, num_free: int, chunks: list[Chunk]) -> int:
        num_tokens = min(num_free, sequence.num_uncomputed)
        chunks.append(Chunk(sequence, sequence.num_computed, num_tokens))
        return num_tokens

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the newest token by preempting the newest sequences; False if it was one itself."""
        if sequence.num_computed >= len(sequence.blocks) * self._block_tokens:
            while not self._pool.has_room(1):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
            sequence.blocks += self._pool.take(1)
        is_short = sequence.num_computed + self._num_ahead >= len(sequence.blocks) * self._block_tokens
        if is_short and self._pool.has_room(1):
            sequence.blocks += self._pool.take(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        logger.info(
            "%s preempted at %d tokens, %d running",
            sequence.request.request_id,
            sequence.num_tokens,
            len(self.running),
        )
        self.running.remove(sequence)
        self._give_back(sequence, is_poisoned=False)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self) -> bool:
        """Move the first waiting sequence to the running ones, if there is room for all its known tokens."""
        if not self.waiting or len(self.running) >= self._max_sequences:
            return False
        sequence = self.waiting[0]
        shared = self._find_shared(sequence)
        num_new = -(-sequence.num_tokens // self._block_tokens) - len(shared)
        num_needed = num_new + self._pool.count_idle(shared)
        if not may_admit(len(self.running), self._max_sequences, num_needed, self._pool.num_available):
            return False
        self._pool.share(shared)
        sequence.blocks = [*shared, *self._pool.take(num_new)]
        sequence.num_computed = len(shared) * self._block_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
            self.num_cached_tokens += sequence.num_cached_tokens
            self.num_prompt_tokens += sequence.num_prompt_tokens
        self.running.append(self.waiting.popleft())
        return True

    def _find_shared(self, sequence: Sequence) -> list[int]:
        """Blocks that hold its beginning already; its last token is left to compute, for the logits."""
        if not self._shares_prefixes:
            return []
        num_blocks = (sequence.num_tokens - 1) // self._block_tokens
        return self._pool.find(sequence.block_keys(self._block_tokens, num_blocks))

    def _give_back(self, sequence: Sequence, is_poisoned: bool) -> list[int]:
        blocks = sequence.blocks
        sequence.restart()
        if is_poisoned:
            self._pool.forget(blocks)
        self._pool.release(blocks)
        return [block for block in blocks if self._pool.holders(block) == 0]
