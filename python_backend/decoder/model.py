"""Llama's forward pass over packed tokens of many sequences, with its keys and values in a paged cache.

Shapes: n = tokens of the step, r = rows whose logits are wanted, b = decoding sequences, w = width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from python_backend.decoder.kernels import Kernels
from python_backend.decoder.kv_cache import KeyValueCache
from python_backend.decoder.linear import Linear, MakeLinear
from python_backend.weights import DecoderConfig, DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each: the first b rows of the step."""

    tables: torch.Tensor  # (b, blocks), int64; filled up with the padding block
    lengths: torch.Tensor  # (b,), int64: tokens each attends to, its new one among them


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

    inputs: torch.Tensor  # (n, w): embeddings of the tokens, images' features in their places; changed
    positions: torch.Tensor  # (n,), int64
    blocks: torch.Tensor  # (n,), int64: where each token's key and value are written
    decode: DecodeGroup | None
    prompts: tuple[PromptSpan, ...]
    logit_rows: torch.Tensor  # (r,), int64


class Layer:
    """One layer's weights, ready for their products."""

    def __init__(self, weights: LayerWeights, make_linear: MakeLinear) -> None:
        self.input_norm = weights.input_norm
        self.qkv = make_linear(weights.qkv, weights.qkv_bias)
        self.output = make_linear(weights.output, weights.output_bias)
        self.mlp_norm = weights.mlp_norm
        self.gate_up = make_linear(weights.gate_up, None)
        self.down = make_linear(weights.down, None)


class LlamaModel:
    """The language model. Reads its weights only; writes the cache that it is given."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, kernels: Kernels) -> None:
        self.config = config
        self._operators = kernels.operators
        self._embedding = weights.embedding
        self._norm = weights.norm
        self._head: Linear = kernels.make_head(weights.head, None)
        self._layers = [Layer(layer, kernels.make_linear) for layer in weights.layers]
        self._fused = kernels.fuse(self._layers, self._norm)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of token ids, (n,) to (n, w)."""
        return functional.embedding(token_ids, self._embedding)

    def forward(self, step: PackedStep, cache: KeyValueCache) -> torch.Tensor:
        """The logits of the step's `logit_rows`, (r, vocab), float32."""
        if self._fused is not None and step.decode is not None and not step.prompts:
            normed = self._fused.decode(step.inputs, step.positions, step.blocks, step.decode, cache)
            return self._head(normed[step.logit_rows]).float()
        operators, hidden = self._operators, step.inputs
        added: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed = operators.add_and_norm(hidden, added, layer.input_norm)
            keys, values = cache.keys(index), cache.values(index)
            query = operators.rotate_and_store(layer.qkv(normed), step.positions, step.blocks, keys, values)
            is_last = index == len(self._layers) - 1  # of it nothing but the logits is wanted
            spans = tuple(map(last_row, step.prompts)) if is_last else step.prompts
            attended = self._attend(query, keys, values, step.decode, spans).flatten(1)
            if is_last:
                hidden, attended = hidden[step.logit_rows], attended[step.logit_rows]
            normed = operators.add_and_norm(hidden, layer.output(attended), layer.mlp_norm)
            added = layer.down(operators.gate(layer.gate_up(normed)))
        return self._head(operators.add_and_norm(hidden, added, self._norm)).float()

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        decode: DecodeGroup | None,
        spans: Iterable[PromptSpan],
    ) -> torch.Tensor:
        attended = torch.zeros_like(query)
        if decode is not None:
            size = len(decode.lengths)
            attended[:size] = self._operators.attend_decodes(query[:size], keys, values, decode.tables, decode.lengths)
        for span in spans:
            attended[span.first : span.last] = self._operators.attend_prompt(
                query[span.first : span.last], keys, values, span.table, span.num_before
            )
        return attended


def last_row(span: PromptSpan) -> PromptSpan:
    """The span's last row alone: the only one that can have logits."""
    return PromptSpan(span.last - 1, span.last, span.num_before + span.last - 1 - span.first, span.table)
