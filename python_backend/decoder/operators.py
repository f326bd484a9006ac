"""What the forward pass does between its matrix products, in torch on any device.

Shapes: n = rows, w = width, h = heads, k = key heads, d = head width, t = tokens of a block, b = sequences.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from python_backend.weights import DecoderConfig


class Operators(Protocol):
    """The operators of one model."""

    def add_and_norm(self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Add `added` to `hidden` (n, w) in place; the sum over its root mean square, times `weight` (w,)."""

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """The rotated queries, (n, h, d), of `heads` (n, (h + 2 k) * d): queries, keys, values in one row.

        Writes the rotated keys and the values to each row's place in the cache, `keys` and `values` (blocks,
        k, t, d): block `blocks` (n,), offset `positions` (n,) modulo t.
        """

    def attend_decodes(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """What one query per sequence (b, h, d) takes from the first `lengths` (b,) tokens of its blocks.

        `tables` (b, blocks) has each sequence's blocks, filled up to a common number. The result is (b, h, d).
        """

    def attend_prompt(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, num_before: int
    ) -> torch.Tensor:
        """What each token of a part of a prompt, `query` (n, h, d), takes from itself and all tokens before it.

        The part stands behind `num_before` tokens of its sequence; `table` (blocks,) has all their blocks.
        """

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, (n, m), of both in one row, (n, 2 m)."""


class TorchOperators:
    """The operators for any device and dtype; `Operators` has the shapes."""

    def __init__(self, config: DecoderConfig, num_positions: int, device: torch.device) -> None:
        self._config = config
        cosine, sine = rotary_tables(config, num_positions)
        self._cosine, self._sine = cosine.to(device), sine.to(device)

    def add_and_norm(self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """See `Operators`; the mean is taken in float32."""
        if added is not None:
            hidden += added
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.norm_epsilon)
        return weight * (wide * scale).to(hidden.dtype)

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """See `Operators`."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = heads.view(len(positions), num_rotated + config.num_kv_heads, config.head_width)
        cosine, sine = (table[positions][:, None].to(heads.dtype) for table in (self._cosine, self._sine))
        rotated = rotate(heads[:, :num_rotated], cosine, sine)
        offsets = positions % keys.shape[2]
        keys[blocks, :, offsets] = rotated[:, config.num_heads :]
        values[blocks, :, offsets] = heads[:, num_rotated:]
        return rotated[:, : config.num_heads]

    def attend_decodes(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """See `Operators`; copies the blocks of all sequences."""
        key, value = gather(keys, tables), gather(values, tables)
        mask = torch.arange(key.shape[2], device=key.device) < lengths[:, None]
        grouped = query.reshape(len(query), key.shape[1], -1, key.shape[3])
        attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask[:, None, None, :])
        return attended.reshape(query.shape)

    def attend_prompt(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, num_before: int
    ) -> torch.Tensor:
        """See `Operators`; copies the blocks."""
        length = num_before + len(query)
        past = (gather(blocks, table[None])[0, :, :length] for blocks in (keys, values))
        return attend_causally(query, *past)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


def rotary_tables(config: DecoderConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles, (positions, d) each, float32; arXiv:2104.09864."""
    frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos() * config.rope_scale, angles.sin() * config.rope_scale


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn each pair of channels (i, i + d/2) of `heads` (n, h, d) by its position's angles (n, 1, d)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def gather(blocks: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Copy the blocks of each table (b, m) out of the cache (blocks, k, t, d) to (b, k, m * t, d)."""
    num_heads, head_width = blocks.shape[1], blocks.shape[3]
    heads = torch.arange(num_heads, device=tables.device)
    rows = tables[:, None, :] * num_heads + heads[None, :, None]
    parts = blocks.flatten(0, 1).flatten(1).index_select(0, rows.flatten())
    return parts.view(tables.shape[0], num_heads, -1, head_width)


def attend_causally(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens (n, h, d) of a sequence to all of it, (k, length, d)."""
    num_kv_heads, length, head_width = key.shape
    num_tokens = query.shape[0]
    grouped = query.reshape(num_tokens, num_kv_heads, -1, head_width).permute(1, 2, 0, 3)
    shape = (num_kv_heads, grouped.shape[1], length, head_width)
    mask = None
    if num_tokens != length:
        mask = torch.ones(num_tokens, length, dtype=torch.bool, device=key.device).tril(length - num_tokens)
    key, value = key[:, None].expand(shape), value[:, None].expand(shape)
    attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, is_causal=mask is None)
    return attended.permute(2, 0, 1, 3).reshape(query.shape)
