"""Llama's forward pass over packed tokens of many sequences, with its keys and values in a paged cache.

Shapes: n = tokens of the step, r = rows whose logits are wanted, b = decoding sequences, h = heads,
g = query heads per key head, w = width, d = head width, t = tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from python_backend.decoder.kv_cache import KeyValueCache
from python_backend.weights import DecoderConfig, DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each: the first b rows of the step."""

    tables: torch.Tensor  # (b, blocks), int64; filled up with the padding block
    lengths: torch.Tensor  # (b,), int64: tokens each attends to, its new one among them

    @property
    def num_sequences(self) -> int:
        """b."""
        return self.tables.shape[0]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Rows `first` to `last` of the step: a part of one sequence, which stands behind `num_before` tokens."""

    first: int
    last: int
    num_before: int
    table: torch.Tensor  # (blocks,), int64: the blocks up to its last token


@dataclass(frozen=True, slots=True)
class PackedStep:
    """What one forward pass computes, on the model's device."""

    inputs: torch.Tensor  # (n, w): embeddings of the tokens, images' features in their places
    positions: torch.Tensor  # (n,), int64
    blocks: torch.Tensor  # (n,), int64: where each token's key and value are written
    offsets: torch.Tensor  # (n,), int64: and at which place of the block
    decode: DecodeGroup | None
    prompts: tuple[PromptSpan, ...]
    logit_rows: torch.Tensor  # (r,), int64


class LlamaModel:
    """The language model. Reads its weights only; writes the cache that it is given."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, context_tokens: int) -> None:
        self.config = config
        self.weights = weights
        dtype, device = weights.norm.dtype, weights.norm.device
        cosine, sine = rotary_tables(config, context_tokens)
        self._cosine = cosine.to(device=device, dtype=dtype)
        self._sine = sine.to(device=device, dtype=dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of token ids, (n,) to (n, w)."""
        return functional.embedding(token_ids, self.weights.embedding)

    def forward(self, step: PackedStep, cache: KeyValueCache) -> torch.Tensor:
        """The logits of the step's `logit_rows`, (r, vocab), float32."""
        hidden = step.inputs
        rotation = (self._cosine[step.positions].unsqueeze(1), self._sine[step.positions].unsqueeze(1))
        for index, layer in enumerate(self.weights.layers):
            normed = root_mean_square_norm(hidden, layer.input_norm, self.config.norm_epsilon)
            hidden = hidden + self._attend(index, layer, normed, rotation, step, cache)
            normed = root_mean_square_norm(hidden, layer.mlp_norm, self.config.norm_epsilon)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        hidden = root_mean_square_norm(hidden[step.logit_rows], self.weights.norm, self.config.norm_epsilon)
        return functional.linear(hidden, self.weights.head).float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        normed: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        step: PackedStep,
        cache: KeyValueCache,
    ) -> torch.Tensor:
        config = self.config
        heads = functional.linear(normed, layer.qkv, layer.qkv_bias)
        heads = heads.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_width)
        rotated = rotate(heads[:, : config.num_heads + config.num_kv_heads], *rotation)
        query, key = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        value = heads[:, config.num_heads + config.num_kv_heads :]
        keys, values = cache.keys(index), cache.values(index)
        keys[step.blocks, :, step.offsets] = key
        values[step.blocks, :, step.offsets] = value
        attended = torch.empty_like(query)
        if step.decode is not None:
            size = step.decode.num_sequences
            attended[:size] = attend_decodes(query[:size], keys, values, step.decode)
        for span in step.prompts:
            rows = slice(span.first, span.last)
            if span.num_before == 0:
                past = (key[rows].transpose(0, 1), value[rows].transpose(0, 1))
            else:
                length = span.num_before + span.last - span.first
                tables = span.table[None]
                past = (gather(keys, tables)[0, :, :length], gather(values, tables)[0, :, :length])
            attended[rows] = attend_prompt(query[rows], *past)
        return functional.linear(attended.flatten(1), layer.output, layer.output_bias)


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


def root_mean_square_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`hidden` (n, w) over its root mean square, which is taken in float32, times `weight` (w,)."""
    wide = hidden.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(hidden.dtype)


def gather(blocks: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Copy the blocks of each table (b, m) out of the cache (blocks, h, t, d) to (b, h, m * t, d)."""
    num_heads, head_width = blocks.shape[1], blocks.shape[3]
    heads = torch.arange(num_heads, device=tables.device)
    rows = tables[:, None, :] * num_heads + heads[None, :, None]
    parts = blocks.flatten(0, 1).flatten(1).index_select(0, rows.flatten())
    return parts.view(tables.shape[0], num_heads, -1, head_width)


def attend_decodes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup
) -> torch.Tensor:
    """What one query per sequence, (b, h * g, d), takes from its blocks of the cache; of the same shape."""
    key, value = gather(keys, group.tables), gather(values, group.tables)
    num_sequences, num_kv_heads, length, head_width = key.shape
    mask = torch.arange(length, device=key.device) < group.lengths[:, None]
    grouped = query.reshape(num_sequences, num_kv_heads, -1, head_width)
    attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask[:, None, None, :])
    return attended.reshape(query.shape)


def attend_prompt(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens (n, h * g, d) of a sequence to all of it, (h, length, d)."""
    num_kv_heads, length, head_width = key.shape
    num_tokens = query.shape[0]
    grouped = query.view(num_tokens, num_kv_heads, -1, head_width).permute(1, 2, 0, 3)
    shape = (num_kv_heads, grouped.shape[1], length, head_width)
    mask = None
    if num_tokens != length:
        mask = torch.ones(num_tokens, length, dtype=torch.bool, device=key.device).tril(length - num_tokens)
    key, value = key[:, None].expand(shape), value[:, None].expand(shape)
    attended = functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, is_causal=mask is None
    )
    return attended.permute(2, 0, 1, 3).reshape(query.shape)
