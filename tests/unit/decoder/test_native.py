"""The compiled operators compute what torch's do, and where they cannot be built torch's are used."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from python_backend.decoder import native
from python_backend.decoder.kernels import KernelsMissing, choose_kernels
from python_backend.decoder.linear import Int8Linear, NativeLinear, PlainLinear
from python_backend.decoder.native import NativeOperators, can_run, load_library
from python_backend.decoder.operators import Operators, TorchOperators
from python_backend.decoder.options import EngineOptions
from python_backend.weights import DecoderConfig, read_config

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
NUM_BLOCKS, BLOCK_TOKENS, POSITIONS = 12, 8, 64

needs_compiler = pytest.mark.skipif(load_library() is None, reason="no C++ compiler here")


@pytest.fixture
def config(checkpoint: Path) -> DecoderConfig:
    """Of a model whose layers are never built."""
    return read_config(checkpoint)


def pair(config: DecoderConfig, dtype: torch.dtype) -> tuple[Operators, Operators]:
    library = load_library()
    assert library is not None
    return (
        NativeOperators(library, config, POSITIONS, dtype),
        TorchOperators(config, POSITIONS, torch.device("cpu")),
    )


def shaped(config: DecoderConfig, num_heads: int, num_kv_heads: int, head_width: int) -> DecoderConfig:
    frequencies = tuple(100.0 ** (-index / head_width) for index in range(0, head_width, 2))
    return replace(
        config,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        rope_frequencies=frequencies,
    )


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 16), (2, 1, 128), (6, 3, 48)])
@pytest.mark.parametrize("lengths", [[1], [24, 8, 17], [3] * 9])
def test_decode_attention_equals_torchs(
    config: DecoderConfig, dtype: torch.dtype, heads: tuple[int, int, int], lengths: list[int]
) -> None:
    compiled, plain = pair(shaped(config, *heads), dtype)
    shape = (NUM_BLOCKS + 1, heads[1], BLOCK_TOKENS, heads[2])
    keys, values = 2 * random(1, *shape, dtype=dtype), random(2, *shape, dtype=dtype)
    query = random(3, len(lengths), heads[0], heads[2], dtype=dtype)
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))
    tables = torch.full((len(lengths), 3), NUM_BLOCKS)
    for row, length in enumerate(lengths):
        used = -(-length // BLOCK_TOKENS)
        tables[row, :used] = order.roll(row)[:used]

    found = compiled.attend_decodes(query, keys, values, tables, torch.tensor(lengths))
    expected = plain.attend_decodes(query, keys, values, tables, torch.tensor(lengths))

    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 16), (2, 1, 128), (6, 3, 48)])
@pytest.mark.parametrize(("num_before", "num_tokens"), [(0, 1), (0, 13), (0, 40), (5, 14), (31, 33), (60, 4)])
def test_prompt_attention_equals_torchs(
    config: DecoderConfig, dtype: torch.dtype, heads: tuple[int, int, int], num_before: int, num_tokens: int
) -> None:
    compiled, plain = pair(shaped(config, *heads), dtype)
    shape = (NUM_BLOCKS + 1, heads[1], BLOCK_TOKENS, heads[2])
    keys, values = 2 * random(1, *shape, dtype=dtype), random(2, *shape, dtype=dtype)
    query = random(3, num_tokens, heads[0], heads[2], dtype=dtype)
    table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))

    found = compiled.attend_prompt(query, keys, values, table, num_before)
    expected = plain.attend_prompt(query, keys, values, table, num_before)

    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_prompt_attends_alike_however_it_is_cut(config: DecoderConfig, dtype: torch.dtype) -> None:
    compiled, _ = pair(shaped(config, 4, 2, 32), dtype)
    shape = (NUM_BLOCKS + 1, 2, BLOCK_TOKENS, 32)
    keys, values = random(1, *shape, dtype=dtype), random(2, *shape, dtype=dtype)
    query, table = random(3, 70, 4, 32, dtype=dtype), torch.arange(NUM_BLOCKS)

    whole = compiled.attend_prompt(query, keys, values, table, 0)

    for first, last in ((0, 70), (0, 20), (20, 21), (21, 70), (64, 70)):
        assert torch.equal(compiled.attend_prompt(query[first:last], keys, values, table, first), whole[first:last])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_added", [False, True])
def test_add_and_norm_equals_torchs(config: DecoderConfig, dtype: torch.dtype, has_added: bool) -> None:
    compiled, plain = pair(config, dtype)
    hidden, weight = random(1, 5, 70, dtype=dtype), random(2, 70, dtype=dtype)
    added = random(3, 5, 70, dtype=dtype) if has_added else None
    other = hidden.clone()

    found = compiled.add_and_norm(hidden, added, weight)
    expected = plain.add_and_norm(other, added, weight)

    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert torch.equal(hidden, other)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_gate_equals_torchs(config: DecoderConfig, dtype: torch.dtype) -> None:
    compiled, plain = pair(config, dtype)
    both = torch.cat([torch.linspace(-120, 120, 150).repeat(3, 1), random(1, 3, 150)], dim=1).to(dtype)

    torch.testing.assert_close(compiled.gate(both), plain.gate(both), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 16)])
def test_rotation_and_storing_equal_torchs(
    config: DecoderConfig, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    compiled, plain = pair(shaped(config, *heads), dtype)
    rows = random(1, 5, (heads[0] + 2 * heads[1]) * heads[2], dtype=dtype)
    positions, blocks = torch.tensor([0, 7, 8, 9, 63]), torch.tensor([3, 3, 0, 0, 11])
    caches = torch.zeros(2, 2, NUM_BLOCKS, heads[1], BLOCK_TOKENS, heads[2], dtype=dtype)

    found = compiled.rotate_and_store(rows, positions, blocks, *caches[0])
    expected = plain.rotate_and_store(rows, positions, blocks, *caches[1])

    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    torch.testing.assert_close(*caches, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert caches[0].count_nonzero() > 0


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_not_finite_stays_so_and_in_its_row(config: DecoderConfig, dtype: torch.dtype) -> None:
    config = shaped(config, 2, 2, 16)
    compiled, _ = pair(config, dtype)
    shape = (4, 2, BLOCK_TOKENS, 16)
    keys, values = random(1, *shape, dtype=dtype), random(2, *shape, dtype=dtype)
    keys[1, 0, 2, 5] = math.nan
    tables, lengths = torch.tensor([[0, 2], [1, 3]]), torch.tensor([12, 12])

    attended = compiled.attend_decodes(random(3, 2, 2, 16, dtype=dtype), keys, values, tables, lengths)
    normed = compiled.add_and_norm(
        torch.tensor([[1.0, 2.0], [math.nan, 1.0]], dtype=dtype), None, torch.ones(2, dtype=dtype)
    )
    gated = compiled.gate(torch.tensor([[1.0, 1.0], [math.nan, 1.0]], dtype=dtype))

    assert attended.isfinite().all(dim=2).tolist() == [[True, True], [False, True]]
    assert normed.isfinite().all(dim=1).tolist() == [True, False]
    assert gated.isfinite().flatten().tolist() == [True, False]


ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 27, 65]


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(24, 40), (32, 64), (300, 38), (1000, 6)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_torchs_for_any_number_of_rows(
    dtype: torch.dtype, shape: tuple[int, int], has_bias: bool
) -> None:
    library = load_library()
    assert library is not None
    weight = random(1, *shape, dtype=dtype)
    bias = random(2, shape[0], dtype=dtype) if has_bias else None
    compiled, plain = NativeLinear(library, weight, bias), PlainLinear(weight, bias)

    for num_rows in ROWS:
        inputs = random(3, num_rows, shape[1], dtype=dtype)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(compiled(inputs), plain(inputs), rtol=tolerance, atol=4 * tolerance)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", [NativeLinear, Int8Linear])
def test_a_row_of_a_product_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, kind: type[NativeLinear] | type[Int8Linear]
) -> None:
    library = load_library()
    assert library is not None
    linear = kind(library, random(1, 300, 64, dtype=dtype), None)
    inputs = random(3, 65, 64, dtype=dtype)

    together = linear(inputs)

    for num_rows in ROWS:
        assert torch.equal(linear(inputs[:num_rows]), together[:num_rows])


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", [NativeLinear, Int8Linear])
def test_threads_share_the_work_and_change_nothing(
    config: DecoderConfig, dtype: torch.dtype, kind: type[NativeLinear] | type[Int8Linear]
) -> None:
    library = load_library()
    assert library is not None
    linear, inputs = kind(library, random(1, 700, 256, dtype=dtype), None), random(2, 70, 256, dtype=dtype)
    compiled, _ = pair(shaped(config, 6, 3, 32), dtype)
    keys, values = random(3, 12, 3, BLOCK_TOKENS, 32, dtype=dtype), random(4, 12, 3, BLOCK_TOKENS, 32, dtype=dtype)
    query, tables, lengths = random(5, 60, 6, 32, dtype=dtype), torch.arange(12)[None], torch.tensor([90])

    def compute(num_threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(num_threads)
        decoded = compiled.attend_decodes(query[:1].contiguous(), keys, values, tables, lengths)
        prompted = compiled.attend_prompt(query, keys, values, tables[0], 20)
        return [decoded, prompted, *(linear(inputs[:num_rows]) for num_rows in ROWS)]

    try:
        alone = compute(1)
        for num_threads in (2, 3, 5):
            for found, expected in zip(compute(num_threads), alone, strict=True):
                assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(1)


@needs_compiler
def test_callers_at_the_same_time_share_no_piece(config: DecoderConfig) -> None:
    library = load_library()
    assert library is not None
    linear = NativeLinear(library, random(1, 1500, 64), None)
    inputs = [random(seed, 9, 64) for seed in range(4)]
    expected = [linear(each) for each in inputs]
    wrong: list[int] = []

    def work(caller: int) -> None:
        torch.set_num_threads(2 + caller % 2)  # of this thread
        for _ in range(300):
            if not torch.equal(linear(inputs[caller]), expected[caller]):
                wrong.append(caller)

    threads = [threading.Thread(target=work, args=(caller,)) for caller in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    torch.set_num_threads(1)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_int8_products_are_those_of_the_rounded_values(dtype: torch.dtype) -> None:
    library = load_library()
    assert library is not None
    weight, bias = random(1, 70, 64, dtype=dtype), random(2, 70, dtype=dtype)
    linear = Int8Linear(library, weight, bias)

    for num_rows in ROWS:
        inputs = random(3, num_rows, 64, dtype=dtype)
        expected = rounded(inputs) @ rounded(weight).T + bias.double()
        step = 0.1 if dtype == torch.bfloat16 else 1e-5  # a tie may be rounded either way
        torch.testing.assert_close(linear(inputs).double(), expected, rtol=TOLERANCES[dtype], atol=step)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Each row to the nearest of 255 steps between plus and minus its largest value."""
    wide = rows.double()
    steps = wide.abs().amax(1, keepdim=True) / 127
    return (wide / steps).round() * steps


@needs_compiler
@pytest.mark.parametrize("kind", [NativeLinear, Int8Linear])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_product_with_what_is_not_finite_is_not_finite_in_that_row_only(
    kind: type[NativeLinear] | type[Int8Linear], value: float
) -> None:
    library = load_library()
    assert library is not None
    inputs = random(3, 3, 64)
    inputs[1, 7] = value

    found = kind(library, random(1, 32, 64), None)(inputs)

    assert found.isfinite().any(dim=1).tolist() == [True, False, True]
    assert found.isfinite().all(dim=1).tolist() == [True, False, True]


def test_shapes_and_dtypes_that_are_not_compiled_run_on_torch(config: DecoderConfig) -> None:
    assert not can_run(shaped(config, 4, 4, 24), torch.float32)
    assert not can_run(config, torch.float16)
    kernels = choose_kernels(config, POSITIONS, EngineOptions(compile=False))
    assert isinstance(kernels.operators, TorchOperators)
    assert isinstance(kernels.make_linear(torch.ones(4, 4), None), PlainLinear)


@pytest.mark.parametrize("compilers", [("no-such-compiler",), ("false",)])
def test_without_a_working_compiler_torchs_operators_are_used(
    config: DecoderConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilers: tuple[str, ...]
) -> None:
    monkeypatch.setattr(native, "COMPILERS", compilers)
    monkeypatch.setattr(native, "CACHE", tmp_path)
    load_library.cache_clear()
    try:
        assert isinstance(choose_kernels(config, POSITIONS, EngineOptions()).operators, TorchOperators)
        with pytest.raises(KernelsMissing, match=r"weights 'int8' need .* a C\+\+ compiler"):
            choose_kernels(config, POSITIONS, EngineOptions(weights="int8"))
        assert not list(tmp_path.glob("*.so"))
    finally:
        load_library.cache_clear()


@needs_compiler
def test_operators_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CACHE", tmp_path / "cache")
    load_library.cache_clear()
    try:
        load_library()
        (built,) = (tmp_path / "cache").iterdir()
        written_ns = built.stat().st_mtime_ns
        load_library.cache_clear()
        load_library()
        assert [path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()] == [written_ns]
        assert os.stat(tmp_path / "cache").st_mode & 0o077 == 0
    finally:
        load_library.cache_clear()
