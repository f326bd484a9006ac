"""The block pool keeps its books: no block lost, held twice or shared under a wrong key."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from python_backend.decoder.kv_cache import BlockPool

NUM_BLOCKS = 6


def key(number: int) -> bytes:
    return bytes([number])


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders that take, publish, share and release, against a plain model of what each key's content is."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what was last written into a block

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def take(self, count: int) -> None:
        if not self.pool.has_room(count):
            return
        blocks = self.pool.take(count)
        assert len(set(blocks)) == count
        assert not any(block in holder for block in blocks for holder in self.held)
        for block in blocks:
            self.content.pop(block, None)
        self.held.append(blocks)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), number=st.integers(0, 3))
    def publish(self, data: st.DataObject, number: int) -> None:
        blocks = data.draw(st.sampled_from([blocks for blocks in self.held if blocks]))
        block = data.draw(st.sampled_from(blocks))
        if block not in self.content:
            self.content[block] = key(number)
            self.pool.publish(block, key(number))

    @rule(numbers=st.lists(st.integers(0, 3), unique=True, max_size=4))
    def share(self, numbers: list[int]) -> None:
        keys = [key(number) for number in numbers]
        found = self.pool.find(keys)
        assert [self.content[block] for block in found] == keys[: len(found)]
        self.pool.share(found)
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if forget:
            self.pool.forget(blocks)
        self.pool.release(blocks)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity(self.held)
        in_use = {block for blocks in self.held for block in blocks}
        assert self.pool.num_available == NUM_BLOCKS - len(in_use)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30)


def pool_of_idle(num_blocks: int) -> tuple[BlockPool, list[int]]:
    """A pool all of whose blocks hold a released prompt, and these in its order."""
    pool = BlockPool(num_blocks)
    blocks = pool.take(num_blocks)
    for number, block in enumerate(blocks):
        pool.publish(block, key(number))
    pool.release(blocks)
    return pool, blocks


def test_the_beginning_of_a_released_sequence_is_evicted_last() -> None:
    pool, blocks = pool_of_idle(3)

    taken = pool.take(2)

    assert taken == blocks[1:]
    assert pool.find([key(0), key(1)]) == [blocks[0]]


def test_blocks_that_came_back_in_any_order_are_taken_as_neighbours() -> None:
    pool = BlockPool(6)
    blocks = pool.take(6)
    for block in (4, 1, 5, 0, 3):
        pool.release([block])

    assert blocks == [0, 1, 2, 3, 4, 5]
    assert [pool.take(2), pool.take(3)] == [[0, 1], [3, 4, 5]]


def test_a_cached_prompt_that_is_evicted_leaves_a_run_of_blocks() -> None:
    pool, _ = pool_of_idle(4)

    assert pool.take(3) == [1, 2, 3]


def test_taking_more_than_there_is_fails_loudly() -> None:
    with pytest.raises(AssertionError, match="4 blocks asked of 3"):
        BlockPool(3).take(4)
