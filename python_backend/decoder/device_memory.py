"""Whether a decoder fits the memory that a GPU has left, told before anything is loaded."""

from __future__ import annotations

import torch

from python_backend.weights import DecoderConfig

MIB = 1 << 20


class MemoryRefused(RuntimeError):
    """The weights and the cache do not fit; the message says by how much, and which key to change."""


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """The language model's tensors in `dtype`."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_width
    attention = config.width * heads + config.num_heads * config.head_width * config.width
    layer = attention + 3 * config.width * config.mlp_width + 2 * config.width
    tables = config.vocab_size * config.width * (1 if config.is_tied else 2)
    return (config.num_layers * layer + tables + config.width) * dtype.itemsize


def working_bytes(config: DecoderConfig, dtype: torch.dtype, step_tokens: int, max_sequences: int) -> int:
    """What a step of so many tokens holds at its widest moment: a layer's MLP, and the logits with their copies."""
    width = config.width + 2 * config.mlp_width + (config.num_heads + 2 * config.num_kv_heads) * config.head_width
    return 2 * step_tokens * width * dtype.itemsize + 3 * max_sequences * config.vocab_size * 4


def check_fit(device: str, free_bytes: int, weights: int, cache: int, working: int) -> None:
    """That everything fits.

    Raises:
        MemoryRefused: it does not.
    """
    needed = weights + cache + working
    if needed <= free_bytes:
        return
    allowed = (free_bytes - weights - working) // MIB
    parts = f"weights {weights // MIB}, KV cache {cache // MIB}, one step {working // MIB} MiB"
    advice = (
        f"allowed for decode.kv_cache_mib: {allowed}"
        if allowed > 0
        else "the weights alone do not fit: another GPU, or decode.dtype 'bfloat16'"
    )
    raise MemoryRefused(f"{device} has {free_bytes // MIB} MiB free and the decoder needs {parts}; {advice}")
