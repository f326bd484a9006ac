"""Decode steps in fixed memory, one ahead of the host: the same tokens, and nothing kept of a step not wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from python_backend.decoder.batch import Chunk
from python_backend.decoder.decode_steps import DecodeSteps, batches_up_to
from python_backend.decoder.device_memory import MIB, MemoryRefused, check_fit, weight_bytes, working_bytes
from python_backend.decoder.engine import Engine, EngineOptions
from python_backend.weights import read_config, read_weights
from tests.unit.decoder.conftest import Case, Harness, Receiver, StartEngine


class Counting:
    """Counts the programs that were run, and those of them that the host had not asked for yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_ahead = self.num_loaded = 0
        advance, load = DecodeSteps._advance, DecodeSteps._load

        def count_advance(steps: DecodeSteps, chunks: list[Chunk]) -> None:
            self.num_ahead += 1
            advance(steps, chunks)

        def count_load(steps: DecodeSteps, chunks: list[Chunk]) -> None:
            self.num_loaded += 1
            load(steps, chunks)

        monkeypatch.setattr(DecodeSteps, "_advance", count_advance)
        monkeypatch.setattr(DecodeSteps, "_load", count_load)


def test_a_greedy_answer_is_decoded_ahead_of_the_host(
    start_engine: StartEngine, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    harness = start_engine(runs_ahead=True, block_tokens=4)
    case = next(case for case in cases if len(case.answer) == 24)

    assert harness.submit(case).token_ids() == case.answer

    # 23 decode steps: the first is loaded, all others had begun, across block borders too; the last ran in vain.
    assert (counting.num_loaded, counting.num_ahead) == (1, 23)


def test_a_batch_that_only_shrinks_takes_what_ran_ahead(
    start_engine: StartEngine, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    harness = start_engine(runs_ahead=True, max_step_tokens=1024)
    with harness.together:
        receivers = [harness.submit(case, str(i), max_tokens=6 + 6 * (i % 2)) for i, case in enumerate(cases[:8])]

    answers = [receiver.token_ids() for receiver in receivers]

    assert answers == [case.answer[: 6 + 6 * (i % 2)] for i, case in enumerate(cases[:8])]
    assert counting.num_ahead > counting.num_loaded


@pytest.mark.parametrize(
    "sampling",
    [{"logprobs": 2}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.2}, {"min_tokens": 8}],
    ids=lambda value: next(iter(value)),
)
def test_what_is_not_plainly_greedy_gets_the_same_tokens(
    start_engine: StartEngine, cases: list[Case], sampling: dict[str, object]
) -> None:
    plain, ahead = start_engine(), start_engine(runs_ahead=True)

    def answers(harness: Harness) -> list[list[tuple[object, ...]]]:
        with harness.together:
            receivers = [harness.submit(case, str(i), **sampling) for i, case in enumerate(cases[:4])]
        return [[(delta.token_ids, delta.logprobs) for delta in receiver.wait()] for receiver in receivers]

    def rounded(deltas: list[list[tuple[object, ...]]]) -> str:
        return str(
            [[(ids, [(each.token_id, round(each.logprob, 3)) for each in many]) for ids, many in row] for row in deltas]
        )  # type: ignore[attr-defined]

    assert rounded(answers(ahead)) == rounded(answers(plain))


def test_the_log_probability_of_the_answer_is_the_same(start_engine: StartEngine, cases: list[Case]) -> None:
    totals = [
        start_engine(runs_ahead=runs_ahead).submit(cases[5]).wait()[-1].cumulative_logprob
        for runs_ahead in (False, True)
    ]

    assert totals[0] == pytest.approx(totals[1], abs=1e-4)


def test_a_prompt_that_comes_in_between_changes_nothing(start_engine: StartEngine, cases: list[Case]) -> None:
    harness = start_engine(runs_ahead=True)
    late: list[Receiver] = []

    def submit(delta: object) -> None:
        if len(late) < 3:
            late.append(harness.submit(cases[len(late) + 1], f"late {len(late)}"))

    first = harness.submit(cases[0], "first", Receiver(on_delta=submit))

    assert first.token_ids() == cases[0].answer
    assert [receiver.token_ids() for receiver in late] == [case.answer for case in cases[1:4]]


def test_logits_that_are_not_finite_end_their_request_only(
    start_engine: StartEngine, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = start_engine(runs_ahead=True)
    take = DecodeSteps._take

    def spoil(steps: DecodeSteps, rows: list[int]) -> object:
        tokens = take(steps, rows)
        if len(rows) == 2:
            tokens.logprobs[1] = None
        return tokens

    monkeypatch.setattr(DecodeSteps, "_take", spoil)
    with harness.together:
        first, second = harness.submit(cases[0], "0"), harness.submit(cases[1], "1")

    outcomes = sorted(str(receiver.wait()[-1].error) for receiver in (first, second))
    assert outcomes == ["None", "[INTERNAL] the model's logits are not finite"]


@pytest.mark.parametrize(
    ("max_sequences", "batches"),
    [(1, (1,)), (3, (1, 2, 3)), (32, (1, 2, 4, 8, 16, 24, 32)), (40, (1, 2, 4, 8, 16, 24, 32, 40))],
)
def test_the_largest_batch_holds_all_sequences(max_sequences: int, batches: tuple[int, ...]) -> None:
    assert batches_up_to(max_sequences) == batches


class Recorder:
    """Records as a GPU does: what a program reads must stand in the same place at every replay."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        return run


def test_every_batch_size_is_recorded_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr("python_backend.decoder.runner.record_graph", lambda device: recorder)
    engine = Engine.load(checkpoint, EngineOptions(num_blocks=64, max_sequences=8, runs_ahead=True), lambda: 0.0)
    steps = engine._runner._steps
    assert steps is not None
    DecodeSteps(steps._model, steps._cache, 8, 64, torch.device("cpu"), recorder)

    assert recorder.num_recorded == 4
    engine.close()


def test_weights_are_counted_as_they_are_loaded(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    weights = read_weights(checkpoint, config, torch.float32, torch.device("cpu"))
    tensors = [weights.embedding, weights.head, weights.norm]
    for layer in weights.layers:
        tensors += [layer.input_norm, layer.qkv, layer.output, layer.mlp_norm, layer.gate_up, layer.down]
    distinct = {tensor.data_ptr(): tensor.numel() * 4 for tensor in tensors}

    assert weight_bytes(config, torch.float32) == sum(distinct.values())
    assert weight_bytes(config, torch.bfloat16) * 2 == sum(distinct.values())
    assert working_bytes(config, torch.bfloat16, 2048, 64) > working_bytes(config, torch.bfloat16, 1024, 64)


@pytest.mark.parametrize(
    ("free", "told"),
    [
        (100, None),
        (
            99,
            "cuda:1 has 99 MiB free and the decoder needs weights 50, KV cache 40, one step 10 MiB; allowed for "
            "decode.kv_cache_mib: 39",
        ),
        (60, "the weights alone do not fit: another GPU, or decode.dtype 'bfloat16'"),
    ],
)
def test_a_gpu_that_is_too_small_is_refused_by_key(free: int, told: str | None) -> None:
    if told is None:
        check_fit("cuda:1", free * MIB, 50 * MIB, 40 * MIB, 10 * MIB)
        return
    with pytest.raises(MemoryRefused) as refused:
        check_fit("cuda:1", free * MIB, 50 * MIB, 40 * MIB, 10 * MIB)
    assert str(refused.value).endswith(told)


@pytest.mark.parametrize("block_tokens", [4, 16])
def test_an_answer_that_fills_the_context_ends_there(
    start_engine: StartEngine, cases: list[Case], block_tokens: int
) -> None:
    answers = [
        start_engine(runs_ahead=runs_ahead, context_tokens=64, block_tokens=block_tokens)
        .submit(cases[0], max_tokens=200, ignore_eos=True)
        .token_ids()
        for runs_ahead in (False, True)
    ]

    assert answers[0] == answers[1]
    assert len(cases[0].token_ids) + len(answers[0]) == 64
