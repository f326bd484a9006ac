"""Compares the GPU's kernels with torch's operators in Triton's interpreter, on a CPU; prints the errors as JSON.

A process of its own, since the interpreter is chosen when the kernels are defined: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from python_backend.decoder.gpu_kernels import GpuOperators
from python_backend.decoder.operators import TorchOperators
from python_backend.weights import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=10,
    width=48,
    mlp_width=72,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    norm_epsilon=1e-5,
    max_position_tokens=128,
    rope_frequencies=tuple(10000.0 ** (-i / 8) for i in range(8)),
    rope_scale=1.0,
    is_tied=False,
    image_token_id=None,
    eos_ids=frozenset(),
)


def compare(config: DecoderConfig, dtype: torch.dtype, block_tokens: int) -> dict[str, float]:
    """The largest difference of each operator, as a share of its largest value."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    wanted, found = TorchOperators(config, 128, device), GpuOperators(config, 128, device)
    lengths = torch.tensor([1, 7, block_tokens, block_tokens + 1, 70])
    size, num_blocks = len(lengths), -(-70 // block_tokens)
    tables = torch.randperm(size * num_blocks).view(size, num_blocks)
    shape = (size * num_blocks + 1, config.num_kv_heads, block_tokens, config.head_width)
    cache = torch.randn(2, *shape).to(dtype)
    hidden, added = torch.randn(size, config.width).to(dtype), torch.randn(size, config.width).to(dtype)
    weight = torch.randn(config.width).to(dtype)
    num_heads = config.num_heads + 2 * config.num_kv_heads
    heads = torch.randn(size, num_heads * config.head_width).to(dtype)
    positions = lengths - 1
    blocks = tables.gather(1, positions[:, None] // block_tokens)[:, 0]
    results: dict[str, list[torch.Tensor]] = {}
    for operators, (keys, values) in ((wanted, cache.clone()), (found, cache.clone())):
        mine = hidden.clone()
        outputs = {
            "norm": operators.add_and_norm(mine, None, weight),
            "add and norm": operators.add_and_norm(mine, added, weight),
            "sum": mine,
            "rotated": operators.rotate_and_store(heads, positions, blocks, keys, values),
            "keys": keys,
            "values": values,
            "gate": operators.gate(torch.cat([hidden, added], 1)),
        }
        outputs["attended"] = operators.attend_decodes(outputs["rotated"], keys, values, tables, lengths)
        for name, output in outputs.items():
            results.setdefault(name, []).append(output.float())
    return {name: float((one - other).abs().max() / one.abs().max()) for name, (one, other) in results.items()}


def main() -> None:
    """All cases."""
    many_heads = replace(CONFIG, num_kv_heads=4, head_width=24, rope_frequencies=CONFIG.rope_frequencies + (1.0,) * 4)
    cases = {
        "float32": (CONFIG, torch.float32, 16),
        "bfloat16": (CONFIG, torch.bfloat16, 16),
        "float16": (CONFIG, torch.float16, 16),
        "odd width": (many_heads, torch.float32, 5),
    }
    print(json.dumps({name: compare(*case) for name, case in cases.items()}))


if __name__ == "__main__":
    assert Path.cwd().joinpath("python_backend").is_dir(), "run in the project's root"
    main()
