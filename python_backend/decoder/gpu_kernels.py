"""The operators on a GPU, as Triton kernels: one pass over memory each, and nothing that a CUDA graph cannot hold.

(Triton the compiler that comes with torch, not the inference server.) Decode attention reads each sequence's own
blocks up to its own length, split over the keys so that small batches fill the GPU too: flash-decoding over a paged
cache, arXiv:2309.06180. `Operators` has the shapes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from python_backend.decoder.operators import TorchOperators
from python_backend.weights import DecoderConfig

TILE_TOKENS = 32  # keys that a program reads at once
PROGRAMS = 1024  # wanted per launch: a few for each of the GPU's multiprocessors
MAX_SPLITS = 16


@triton.jit
def _attend_split(  # type: ignore[no-untyped-def]
    query, keys, values, tables, lengths, sums, tops, weights,
    table_stride, block_stride, head_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence over its part of the keys: weighted sum, largest score, sum of weights."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    part = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    begin = split * part
    end = tl.minimum(begin + part, length)
    channels = tl.arange(0, PADDED)
    is_channel = channels < HEAD
    row = sequence * HEADS + head
    asked = tl.load(query + row * HEAD + channels, mask=is_channel, other=0.0).to(tl.float32) * scale
    top = tl.full((1,), -float("inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < end
        block = tl.load(tables + sequence * table_stride + tokens // BLOCK_TOKENS, mask=is_token, other=0).to(tl.int64)
        offset = block * block_stride + (head // GROUP) * head_stride + (tokens % BLOCK_TOKENS) * HEAD
        places = offset[:, None] + channels[None, :]
        is_place = is_token[:, None] & is_channel[None, :]
        key = tl.load(keys + places, mask=is_place, other=0.0).to(tl.float32)
        scores = tl.where(is_token, tl.sum(asked[None, :] * key, 1), -float("inf"))
        larger = tl.maximum(top, tl.max(scores, 0))
        shrink = tl.exp(top - larger)
        share = tl.exp(scores - larger)
        value = tl.load(values + places, mask=is_place, other=0.0).to(tl.float32)
        total = total * shrink + tl.sum(share[:, None] * value, 0)
        weight = weight * shrink + tl.sum(share, 0)
        top = larger
    place = row * SPLITS + split
    tl.store(sums + place * HEAD + channels, total, mask=is_channel)
    tl.store(tops + place + tl.arange(0, 1), top)
    tl.store(weights + place + tl.arange(0, 1), weight)


@triton.jit
def _join_splits(  # type: ignore[no-untyped-def]
    sums, tops, weights, result, HEAD: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr
):
    """The parts of one query head put together."""
    row = tl.program_id(0)
    splits, channels = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    is_channel = channels < HEAD
    top = tl.load(tops + row * SPLITS + splits)
    share = tl.exp(top - tl.max(top, 0))  # 0 for a part without keys
    weight = tl.sum(tl.load(weights + row * SPLITS + splits) * share, 0)
    places = (row * SPLITS + splits)[:, None] * HEAD + channels[None, :]
    parts = tl.load(sums + places, mask=is_channel[None, :], other=0.0)
    attended = tl.sum(parts * share[:, None], 0) / weight
    tl.store(result + row * HEAD + channels, attended.to(result.dtype.element_ty), mask=is_channel)


@triton.jit
def _add_and_norm(  # type: ignore[no-untyped-def]
    hidden, added, scale, result, epsilon, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    is_column = columns < WIDTH
    places = row * WIDTH + columns
    total = tl.load(hidden + places, mask=is_column, other=0.0)
    if ADDS:
        other = tl.load(added + places, mask=is_column, other=0.0)
        total = (total.to(tl.float32) + other.to(tl.float32)).to(total.dtype)
        tl.store(hidden + places, total, mask=is_column)
    wide = total.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / WIDTH
    normed = (wide * tl.rsqrt(mean + epsilon)).to(total.dtype).to(tl.float32)
    scaled = normed * tl.load(scale + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(result + places, scaled.to(total.dtype), mask=is_column)


@triton.jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    heads, positions, blocks, cosine, sine, query, keys, values, block_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query turned, a key turned and stored, or a value stored."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    half = tl.arange(0, PADDED)
    is_half = half < HALF
    source = heads + (row * (HEADS + 2 * KV_HEADS) + head) * HEAD
    first = tl.load(source + half, mask=is_half, other=0.0)
    second = tl.load(source + HALF + half, mask=is_half, other=0.0)
    turned_first, turned_second = first, second
    if head < HEADS + KV_HEADS:
        turn = position * HEAD + half
        near, far = tl.load(cosine + turn, mask=is_half, other=0.0), tl.load(sine + turn, mask=is_half, other=0.0)
        turned_first = (first * near - second * far).to(first.dtype)
        turned_second = (second * near + first * far).to(first.dtype)
    if head < HEADS:
        target = query + (row * HEADS + head) * HEAD
        tl.store(target + half, turned_first, mask=is_half)
        tl.store(target + HALF + half, turned_second, mask=is_half)
    else:
        offset = tl.load(blocks + row) * block_stride + (position % BLOCK_TOKENS) * HEAD
        if head < HEADS + KV_HEADS:
            target = keys + offset + (head - HEADS) * head_stride
        else:
            target = values + offset + (head - HEADS - KV_HEADS) * head_stride
        tl.store(target + half, turned_first, mask=is_half)
        tl.store(target + HALF + half, turned_second, mask=is_half)


@triton.jit
def _gate(gate_up, result, num_items, WIDTH: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_place = places < num_items
    source = (places // WIDTH) * 2 * WIDTH + places % WIDTH
    gate = tl.load(gate_up + source, mask=is_place, other=0.0)
    up = tl.load(gate_up + source + WIDTH, mask=is_place, other=0.0)
    wide = gate.to(tl.float32)
    open_part = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(result + places, (open_part * up.to(tl.float32)).to(gate.dtype), mask=is_place)


class GpuOperators(TorchOperators):
    """The operators by Triton kernels; `Operators` has the shapes."""

    def __init__(self, config: DecoderConfig, num_positions: int, device: torch.device) -> None:
        super().__init__(config, num_positions, device)
        self._padded = triton.next_power_of_2(config.head_width)

    def add_and_norm(self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """See `Operators`; the mean is taken in float32."""
        result = torch.empty_like(hidden)
        rows, width = hidden.shape
        other = hidden if added is None else added
        padded, adds = triton.next_power_of_2(width), added is not None
        _add_and_norm[(rows,)](hidden, other, weight, result, self._config.norm_epsilon, width, padded, adds)
        return result

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """See `Operators`."""
        config, rows = self._config, len(positions)
        query = torch.empty((rows, config.num_heads, config.head_width), dtype=heads.dtype, device=heads.device)
        half = config.head_width // 2
        _rotate_and_store[(rows, config.num_heads + 2 * config.num_kv_heads)](
            heads, positions, blocks, self._cosine, self._sine, query, keys, values, keys.stride(0), keys.stride(1),
            config.num_heads, config.num_kv_heads, config.head_width, half, triton.next_power_of_2(half), keys.shape[2],
        )  # fmt: skip
        return query

    def attend_decodes(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """See `Operators`."""
        size, heads, head = query.shape
        splits = num_splits(size * heads)
        sums = torch.empty((size, heads, splits, head), dtype=torch.float32, device=query.device)
        tops, weights = torch.empty((2, size, heads, splits), dtype=torch.float32, device=query.device)
        result = torch.empty_like(query)
        _attend_split[(size, heads, splits)](
            query.contiguous(), keys, values, tables, lengths, sums, tops, weights,
            tables.stride(0), keys.stride(0), keys.stride(1), head**-0.5,
            heads, heads // keys.shape[1], keys.shape[2], head, self._padded, TILE_TOKENS, splits,
        )  # fmt: skip
        _join_splits[(size * heads,)](sums, tops, weights, result, head, self._padded, splits)
        return result

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        result = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        tile = 1024
        _gate[(triton.cdiv(rows * width, tile),)](gate_up, result, rows * width, width, tile)
        return result


def num_splits(num_rows: int) -> int:
    """Into how many parts each of `num_rows` query heads' keys are cut: a power of two that fills the GPU."""
    splits = 1
    while splits < MAX_SPLITS and num_rows * splits * 2 <= PROGRAMS:
        splits *= 2
    return splits
