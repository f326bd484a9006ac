"""The paged KV cache: who holds which block, and the memory of the blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import torch

from python_backend.decoder.memory import zeros
from python_backend.weights import DecoderConfig


class BlockPool:
    """Accounts for `num_blocks` blocks of the cache; holds no memory. Owned by the engine thread.

    A block is in one of three states:

        free   nobody holds it and its content is worthless
        idle   nobody holds it, but its content has a key: it can be shared again, or taken if none is free
        held   by one or more sequences, counted by its references; it may have a key

    A key names the content of a block and of all blocks before it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))  # a heap: the lowest is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give: free and idle ones."""
        return len(self._free) + len(self._idle)

    def has_room(self, num_blocks: int) -> bool:
        """Whether `take(num_blocks)` can be done."""
        return num_blocks <= self.num_available

    def take(self, num_blocks: int) -> list[int]:
        """New blocks with one reference each; free ones first, then the least recently used idle ones.

        They come in ascending order, and mostly are neighbours: attention reads a run of blocks nearly twice as fast
        as blocks here and there.
        """
        assert self.has_room(num_blocks), f"{num_blocks} blocks asked of {self.num_available}"
        blocks = []
        for _ in range(num_blocks):
            if self._free:
                block = heappop(self._free)
            else:
                block, _ = self._idle.popitem(last=False)
                self._drop_key(block)
            self._references[block] = 1
            blocks.append(block)
        return sorted(blocks)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks with the first of `keys`, up to the first key that is not here. Changes nothing."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: sharing those uses up room."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which `find` gave."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def publish(self, block: int, key: bytes) -> None:
        """Name the content of a held block, so that `find` gives it; the first block with a key keeps it."""
        assert self._references[block] > 0, f"block {block} is published but nobody holds it"
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each; a block without any becomes idle, or free when it has no key.

        The last blocks go first, so that of one sequence the beginning stays longest.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    heappush(self._free, block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Take the keys off held blocks: their content must not be shared."""
        for block in blocks:
            self._drop_key(block)

    def holders(self, block: int) -> int:
        """How many references there are to `block`."""
        return self._references[block]

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Compare the books with the blocks that sequences hold; an AssertionError names a difference."""
        counts = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts == self._references, "the references differ from the blocks that sequences hold"
        unheld = sorted([*self._free, *self._idle])
        expected = [block for block, count in enumerate(counts) if count == 0]
        assert unheld == expected, f"free and idle blocks are {unheld}, expected {expected}"
        assert all(block in self._key_of for block in self._idle), "an idle block has no key"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "keys and blocks differ"

    def _drop_key(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]


class KeyValueCache:
    """The memory of all blocks, (layers, 2, num_blocks + 1, kv_heads, block_tokens, head), always finite.

    The last block, `padding_block`, belongs to nobody: it fills block tables up to a common length.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (config.num_layers, 2, num_blocks + 1, config.num_kv_heads, block_tokens, config.head_width)
        self._memory = zeros(shape, dtype, device)
        self.block_tokens = block_tokens
        self.padding_block = num_blocks

    def keys(self, layer: int) -> torch.Tensor:
        """The keys of `layer`, (num_blocks + 1, kv_heads, block_tokens, head); a view to read and write."""
        return self._memory[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """The values of `layer`, of the same shape as its keys; a view to read and write."""
        return self._memory[layer, 1]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero the blocks, so that a NaN in them reaches no later holder through masked positions."""
        self._memory[:, :, list(blocks)] = 0


def block_bytes(config: DecoderConfig, block_tokens: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, keys and values."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_width
    return per_token * block_tokens * dtype.itemsize
