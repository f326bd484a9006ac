"""Decode steps at some batch sizes, recorded, plain, and one ahead of the host; and one prompt's prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from python_backend.decoder.batch import Chunk
from python_backend.decoder.decode_steps import DecodeSteps, record_graph
from python_backend.decoder.kernels import choose_kernels
from python_backend.decoder.kv_cache import KeyValueCache
from python_backend.decoder.model import LlamaModel, PackedStep, PromptSpan
from python_backend.decoder.options import EngineOptions
from python_backend.weights import DecoderConfig, DecoderWeights, LayerWeights
from tests.device.setting import Setting

BLOCK_TOKENS = 16


@torch.inference_mode()
def run(setting: Setting) -> dict[str, object]:
    """Milliseconds per step, and how far from reading weights and keys once."""
    config = _config(setting)
    options = EngineOptions(device=str(setting.torch_device), dtype=str(setting.dtype).removeprefix("torch."))
    kernels = choose_kernels(config, config.max_position_tokens, options)
    model = LlamaModel(config, _weights(setting, config), kernels)
    largest = max(setting.geometry.decode_batches)
    per_sequence = -(-config.max_position_tokens // BLOCK_TOKENS)
    cache = KeyValueCache(config, largest * per_sequence, BLOCK_TOKENS, setting.dtype, setting.torch_device)
    records = {"plain": None, "graphs": record_graph(setting.torch_device) if setting.device == "cuda" else None}
    steps = {
        name: DecodeSteps(model, cache, largest, config.max_position_tokens, setting.torch_device, record)
        for name, record in records.items()
    }
    found: dict[str, object] = {"operators": type(kernels.operators).__name__, "batches": {}}
    for batch in setting.geometry.decode_batches:
        found["batches"][str(batch)] = _measure(setting, steps, batch, per_sequence)  # type: ignore[index]
    found["prefill"] = _prefill(setting, model, cache, per_sequence)
    return found


def _measure(setting: Setting, steps: dict[str, DecodeSteps], batch: int, per_sequence: int) -> dict[str, object]:
    sizes = setting.geometry
    tokens, row = {}, {}
    for name, each in steps.items():
        chunks = list(_chunks(batch, sizes.context_tokens, per_sequence, sizes.vocabulary))
        tokens[name] = each.run(chunks, goes_on=False)[0].token_ids
        row[f"{name}_ms"] = round(setting.timed_ms(lambda e=each, c=chunks: e.run(c, goes_on=False)), 3)  # type: ignore[misc]
    row["ahead_ms"] = round(_ahead_ms(setting, steps["graphs"], batch, per_sequence), 3)
    bytes_read = 2 * (sizes.num_parameters + batch * sizes.context_tokens * 2 * sizes.layers * sizes.width)
    floor_ms = bytes_read / setting.bytes_per_s * 1e3
    row |= {"floor_ms": round(floor_ms, 4), "ratio": round(row["ahead_ms"] / floor_ms, 2)}
    return {**row, "are_tokens_equal": tokens["plain"] == tokens["graphs"]}


def _ahead_ms(setting: Setting, steps: DecodeSteps, batch: int, per_sequence: int) -> float:
    """Per token, as the engine runs: the host takes a step's tokens while the next one is computed."""
    sizes = setting.geometry
    chunks = list(_chunks(batch, sizes.context_tokens, per_sequence, sizes.vocabulary))
    began, count = 0.0, sizes.repeats
    for index in range(count + 3):
        if index == 3:
            setting.wait()
            began = time.perf_counter()
        token_ids = steps.run(chunks, goes_on=True)[0].token_ids
        for chunk, token_id in zip(chunks, token_ids, strict=True):
            chunk.sequence.token_ids.append(token_id)
        chunks = [Chunk(chunk.sequence, chunk.start + 1, 1) for chunk in chunks]
    elapsed_ms = (time.perf_counter() - began) * 1e3
    steps.forget()
    return elapsed_ms / count


def _chunks(batch: int, context_tokens: int, per_sequence: int, vocabulary: int) -> Iterator[Chunk]:
    """Sequences of random tokens, each with blocks of its own for its whole context."""
    generator = torch.Generator().manual_seed(batch)
    for index in range(batch):
        token_ids = torch.randint(0, vocabulary, (context_tokens,), generator=generator).tolist()
        blocks = list(range(index * per_sequence, (index + 1) * per_sequence))
        sequence = SimpleNamespace(serial=index, token_ids=token_ids, blocks=blocks)
        yield Chunk(sequence, context_tokens - 1, 1)  # type: ignore[arg-type]


def _prefill(setting: Setting, model: LlamaModel, cache: KeyValueCache, per_sequence: int) -> dict[str, object]:
    sizes, device = setting.geometry, setting.torch_device
    number = sizes.prompt_tokens
    positions = torch.arange(number, device=device)
    table = torch.arange(-(-number // BLOCK_TOKENS), device=device)
    token_ids = torch.randint(0, sizes.vocabulary, (number,), device=device)

    def forward() -> torch.Tensor:
        span = PromptSpan(0, number, 0, table)
        last = positions[-1:]
        step = PackedStep(model.embed(token_ids), positions, positions // BLOCK_TOKENS, None, (span,), last)
        return model.forward(step, cache)

    floor_ms = 2 * sizes.num_parameters * number / setting.flop_per_s * 1e3
    found_ms = setting.timed_ms(forward, max(3, sizes.repeats // 3))
    return {"tokens": number, "ms": round(found_ms, 3), "floor_ms": round(floor_ms, 4)}


def _config(setting: Setting) -> DecoderConfig:
    sizes = setting.geometry
    head = sizes.width // sizes.heads
    return DecoderConfig(
        vocab_size=sizes.vocabulary,
        width=sizes.width,
        mlp_width=sizes.mlp,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        head_width=head,
        norm_epsilon=1e-5,
        max_position_tokens=sizes.context_tokens + sizes.repeats + 2 * BLOCK_TOKENS,
        rope_frequencies=tuple(10000.0 ** (-2 * index / head) for index in range(head // 2)),
        rope_scale=1.0,
        is_tied=False,
        image_token_id=None,
        eos_ids=frozenset(),
    )


def _weights(setting: Setting, config: DecoderConfig) -> DecoderWeights:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.empty((rows, columns), dtype=setting.dtype, device=setting.torch_device)
        return values.normal_(std=columns**-0.5)

    ones = torch.ones(config.width, dtype=setting.dtype, device=setting.torch_device)

    def layers() -> Iterator[LayerWeights]:
        for _ in range(config.num_layers):
            yield LayerWeights(
                input_norm=ones,
                qkv=matrix(3 * config.width, config.width),
                qkv_bias=None,
                output=matrix(config.width, config.width),
                output_bias=None,
                mlp_norm=ones,
                gate_up=matrix(2 * config.mlp_width, config.width),
                down=matrix(config.width, config.mlp_width),
            )

    torch.manual_seed(0)
    table = matrix(config.vocab_size, config.width)
    return DecoderWeights(table, layers(), ones, matrix(config.vocab_size, config.width))
